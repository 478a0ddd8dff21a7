"""Run vLLM's engine once, in a process of its own, and print what it says of some prompts as JSON.

Arguments: a file with ``{"model", "engine", "prompts", "max_tokens"}``; the answer goes to a second file: per prompt
the log-probabilities of its tokens after the first, those of the tokens generated, and how many tokens were cached.
"""

import json
import sys
from pathlib import Path


def main(asked, answer):
    from vllm import LLM, SamplingParams

    engine = LLM(model=asked["model"], **asked["engine"])
    answers = []
    # One after the other: the composition of a batch changes BF16 sums.
    for prompt in asked["prompts"]:
        generated = asked["max_tokens"]
        sampling = SamplingParams(
            max_tokens=max(generated, 1),
            temperature=0,
            ignore_eos=True,
            logprobs=0 if generated else None,
            prompt_logprobs=None if generated else 0,
        )
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        of_prompt = zip((output.prompt_logprobs or [None])[1:], prompt[1:], strict=False)
        of_text = zip(output.outputs[0].logprobs or [], output.outputs[0].token_ids, strict=False)
        answers.append(
            {
                "prompt": [at[token].logprob for at, token in of_prompt],
                "text": [at[token].logprob for at, token in of_text],
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
            }
        )
    answer.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
