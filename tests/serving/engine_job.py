"""Run vLLM's engine in a process of its own, put rounds of requests to it and write down what it says.

Arguments: a file with ``{"engine", "rounds", "poisoned"}`` and the file for the answers, both JSON. ``engine`` is what
`vllm.LLM` takes; a round is ``{"requests", "together"}``. A request has a ``prompt`` of tokens and

- ``text``, tokens that are forced one after the other, or ``only``, a token, and ``new_tokens``, how often; with
  neither, the prompt's own log-probabilities are asked for;
- ``salt``, which keeps its blocks apart from those of other salts.
"""

import json
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

PREEMPTIONS, ACCEPTED = "vllm:num_preemptions", "vllm:spec_decode_num_accepted_tokens"


class Forced(AdapterLogitsProcessor):
    """Leaves each step one token; the log-probabilities that vLLM returns are those before it."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        text = (params.extra_args or {}).get("text")

        def force(written, logits):
            token = text[len(written)]
            only = torch.full_like(logits, -torch.inf)
            only[token] = logits[token]
            return only

        return force if text else None


def poison(worker):
    """Fill the cache with ones, which is NaN in every format: what memory may hold that was just allocated."""
    for cache in worker.model_runner.kv_caches:
        cache.view(torch.uint8).fill_(0xFF)


def sampling(request):
    new_tokens = len(request.get("text", ())) or request.get("new_tokens", 0)
    return SamplingParams(
        max_tokens=new_tokens or 1,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if new_tokens else None,
        prompt_logprobs=None if new_tokens else 0,
        allowed_token_ids=[request["only"]] if "only" in request else None,
        extra_args={"text": request["text"]} if "text" in request else None,
    )


def ask(engine, requests):
    prompts = [
        {"prompt_token_ids": request["prompt"], "cache_salt": request["salt"]}
        if "salt" in request
        else {"prompt_token_ids": request["prompt"]}
        for request in requests
    ]
    return engine.generate(prompts, [sampling(request) for request in requests], use_tqdm=False)


def answer(output):
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    of_prompt = zip((output.prompt_logprobs or [None])[1:], output.prompt_token_ids[1:], strict=False)
    of_text = completion.logprobs or []
    return {
        "prompt": [at[token].logprob for at, token in of_prompt],
        "text": [at[token].logprob for at, token in zip(of_text, tokens, strict=False)],
        "tokens": tokens,
        "cached": output.num_cached_tokens,
    }


def main(asked, path):
    # The metrics tell whether requests were preempted, and drafts accepted.
    engine = LLM(**asked["engine"], disable_log_stats=False)
    if asked["poisoned"]:
        engine.collective_rpc(poison)
    answers = {}
    for name, each in asked["rounds"].items():
        requests = each["requests"]
        # One after the other, unless it is about batches: their composition changes BF16 sums.
        groups = [requests] if each["together"] else [[request] for request in requests]
        answers[name] = [answer(output) for group in groups for output in ask(engine, group)]
    metrics = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in (PREEMPTIONS, ACCEPTED)}
    path.write_text(json.dumps({"rounds": answers, "metrics": metrics}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
