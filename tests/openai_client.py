"""What the tests of a server ask it, with OpenAI's client."""

import re

import httpx
from served_checkpoint import MARKS, TOKENS

MODEL = "tiny"
TOP = 20
# A grammar leaves room for white space between the parts of JSON, where a random model stays for long.
NO_SPACE = {str(TOKENS[byte]): -100 for byte in "ĠĊčĉ"}
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


def connect(server):
    """A client past any proxy of the environment; the server has no key."""
    import openai

    return openai.OpenAI(
        base_url=server.base_url, api_key="none", http_client=openai.DefaultHttpxClient(trust_env=False), max_retries=0
    )


def complete(client, prompt, max_tokens, **options):
    """A greedy completion of exactly so many tokens, whatever ends the random model's sentences."""
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra, **options
    )


def chat(client, **options):
    messages = [{"role": "user", "content": "Which weather?"}]
    options = {"max_tokens": 120, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def forced(text):
    """The options with which a reply is this text, its marks as single tokens, as a trained model writes them."""
    return {
        "logit_bias": {str(TOKENS[mark]): 50 for mark in MARKS},
        "extra_body": {"structured_outputs": {"regex": re.sub(r"([{}])", r"\\\1", text)}},
    }


def next_token_logprobs(client, prompt, **extra):
    """The likeliest next tokens by their bytes, with log-probabilities, and how many of the prompt's were cached."""
    reply = complete(client, prompt, 1, logprobs=TOP, extra_body={"return_tokens_as_token_ids": True, **extra})
    (choice,) = reply.choices
    return choice.logprobs.top_logprobs[0], reply.usage.prompt_tokens_details.cached_tokens


def metric(server, name):
    """The sum of one of vLLM's metrics over its labels."""
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"vllm:{name}[{{ ]", line))
