"""The testbed's tokenizer: byte-level BPE, digits one by one, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.testbed.samples import END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = (END, "<|im_start|>", "<|im_end|>")
"""In the order of their token ids, 0 to 2. Texts end with the first."""

CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer that knows every byte, so that no text is unknown to it.

    Digits stand alone: a number of seven digits has seven tokens, whatever numbers the text had.

    Parameters
    ----------
    texts
        To find frequent pieces in.
    vocabulary
        Tokens, the special ones and the 256 bytes among them.

    Raises
    ------
    ValueError
        ``vocabulary`` is too small, or the texts have too few different pieces to fill it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = len(SPECIAL) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < least:
        raise ValueError(f"vocabulary is {vocabulary}; accepted: at least {least}, the bytes and special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocabulary:
        raise ValueError(
            f"vocabulary is {vocabulary}, of which the texts fill {tokenizer.get_vocab_size()}; accepted: more text"
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, longest: int) -> None:
    """Write what transformers' ``AutoTokenizer`` reads.

    Parameters
    ----------
    tokenizer
        From `train_tokenizer`.
    folder
        Gets ``tokenizer.json`` and ``tokenizer_config.json``.
    longest
        Tokens of the longest context.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
