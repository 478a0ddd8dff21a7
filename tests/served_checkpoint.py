"""A tiny Kolibri-1 to serve: random weights in the release's format, a tokenizer of bytes, a chat template."""

import json

from checkpoint_fixtures import tiny_config, write_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvlab.models.random_weights import RandomWeights

WINDOW = 65
FULL = (2, 5)
MAX_TOKENS = 2048
SEED = 5

# As in the release, only what delimits turns is special: the rest is text that the reply's parsers read.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = {token: index for index, token in enumerate([*SPECIAL, *MARKS, *BYTES])}
END = TOKENS["<|endoftext|>"]

# Turns between marks; tools in a system turn; an empty block of thoughts where thinking is switched off.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% set effort = reasoning_effort | default(none) %}
{%- if effort == "none" or (effort is none and enable_thinking is defined and enable_thinking is false) %}<think>

</think>

{% endif %}
{%- endif %}"""


def served_config():
    """Two full-attention layers among six, heads of the release's size and twelve, so that two ranks share them."""
    kinds = ["full_attention" if layer in FULL else "sliding_attention" for layer in range(6)]
    return tiny_config(
        # A multiple of 64, to which vLLM pads.
        vocab_size=320,
        hidden_size=256,
        num_hidden_layers=len(kinds),
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=kinds,
        sliding_window=WINDOW,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )


def write_tokenizer(folder):
    """Every byte is a token, so that any text has as many tokens as bytes, and any tokens but the marks are text."""
    tokenizer = Tokenizer(models.BPE(vocab=TOKENS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": MAX_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2))


def write_served_checkpoint(folder, dtype="bf16"):
    """Write weights, config, tokenizer; returns the folder."""
    write_checkpoint(folder, RandomWeights(served_config(), SEED), dtype=dtype)
    ends = {"eos_token_id": [END, TOKENS["<|im_end|>"]], "pad_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    write_tokenizer(folder)
    return folder
