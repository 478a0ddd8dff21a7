"""Numbers that the library and its command line share, apart from all that is heavy, so that --help is quick."""

MAX_NUM_BATCHED_TOKENS = 8192
"""vLLM's default for its server on GPUs of at least 70 GiB."""

DECODE_STEPS = 512
"""Timed at each point, as the write-up does."""

REQUESTS = 5
"""Timed at each context, for first tokens."""

GPQA_RUNS = 4
"""The write-up's."""
