"""Wording, natural text and a tokenizer for tests of the testbed's tasks."""

import json
import string
from pydoc_data.topics import topics

import numpy as np

from kvlab.testbed.tokenizer import train_tokenizer

NATURAL = " ".join(topics[name] for name in sorted(topics))
LETTERS = [f"{first}{second}r" for first in string.ascii_lowercase for second in "aeiou"]
WORDS = sorted({f"{first}{second}" for first in LETTERS for second in LETTERS[:40]})

HIDING = {"head": "Keep in mind.", "noise": "Rain falls. All is quiet.", "needle": "Note: {key} holds {value}."}
ASKING = "What does {key} hold? The note on {key} says"
PARTS = {
    "version": "0",
    "numbers": {**HIDING, "ask": f"{ASKING} number"},
    "uuids": {**HIDING, "ask": f"{ASKING} uuid"},
    "vt": {
        "head": "Follow the names.\n\n",
        "noise": "Rain falls. All is quiet.",
        "first": "SET {name} = {value}",
        "then": "SET {name} = SET {of} ",
        "ask": "\nQ: Which {num_v} names are {query}? A: Those of {query} are:",
    },
    "cwe": {"head": "A list.\n", "ask": "\nQ: The commonest?\n\nA: They are:"},
    "fwe": {"head": "A text. ", "ask": "\nQ: The most frequent? A: They are:"},
    "words": {"adjectives": WORDS[:900], "nouns": [*WORDS[900:3000], "dump truck"], "common": WORDS},
}


def passages(rng, size):
    start = rng.randrange(len(NATURAL) - 4 * size)
    return NATURAL[start : start + 4 * size]


def train():
    return train_tokenizer([*topics.values(), json.dumps(PARTS)], 8192)


def answered(tokenizer, ids, answer):
    """Pairs of what was read until an answer, and the answer."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], answer, [False]]).astype(int)))
    return [
        tuple(tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (ids[:start], ids[start:stop]))
        for start, stop in edges.reshape(-1, 2)
    ]
