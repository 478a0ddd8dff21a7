"""Run one filled session in vLLM and print how its pages compare with the template's; started as a process."""

import json
import sys

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvlab.serving.throughput.engine import Throughput
from kvlab.serving.throughput.job import Job

job = Job(**json.loads(sys.argv[1]))
driver = Throughput(job)
driver.prefill_template()
template = get_kv_transfer_group().template
# More pages than the session has, so that what is read here is what was filled and not what was left there.
for _, cache in (item for group in template.groups for item in group.items()):
    cache.fill_(0)
driver.add(driver.prompt(job.points[0]["context"]), job.growth)
(request,) = driver.scheduler.requests
while not driver.step().tokens:
    pass
answer = []
numbers = driver.scheduler.kv_cache_manager.get_block_ids(request)
for group, pages, blocks in zip(template.groups, template.pages, numbers, strict=True):
    real = [number for number in blocks if number]
    for name, cache in group.items():
        kept = {bytes(page.contiguous().flatten().tolist()) for page in pages[name].cpu()}
        # In the last page the step itself has written.
        filled = [bytes(cache[number].contiguous().flatten().tolist()) for number in real[:-1]]
        answer.append(
            {
                "layer": name,
                "pages": len(filled),
                "kept": len(kept),
                "known": sum(page in kept for page in filled),
                "empty": sum(not any(page) for page in filled),
                "different": len(set(filled)),
                "null_is_empty": not cache[0].any().item(),
            }
        )
print(json.dumps(answer), file=sys.stderr)
