"""What the kernels are timed on: shapes, lengths, shuffled pages, and the inputs of one entrant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

HEAD_DIM = 128
SHAPES = ((24, 2), (48, 4))
"""Query and KV heads of Kolibri-1 on one GPU: tensor parallel over two, and on one alone."""

KIB = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
Q_LENS = (2, 4, 8)
TOKENS = (1, 8, 64, 512, 2048, 8192)
PREFILL = "prefill"
"""Label of the cases whose new tokens are a chunk of a prompt."""

ROTATED_BYTES = 400e6
"""All sets of inputs together: several times Hopper's L2 (60 MB), so that no set is still in it when its turn comes."""
MOST_SETS = 400
CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class DecodeCase:
    """One step of decode attention.

    Attributes
    ----------
    num_heads, num_kv_heads
        Query and KV heads of a layer on this GPU.
    seq_lens
        Context of each sequence in tokens, the new ones included.
    label
        What the lengths are.
    q_len
        New tokens per sequence.
    """

    num_heads: int
    num_kv_heads: int
    seq_lens: tuple[int, ...]
    label: str = "uniform"
    q_len: int = 1

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.seq_lens)

    def cache_bytes(self, cell_bytes: float) -> int:
        """Bytes of cache that the step reads, of ``cell_bytes`` per token and KV head, key and value together."""
        return round(sum(self.seq_lens) * self.num_kv_heads * cell_bytes)

    def columns(self) -> dict[str, object]:
        """Return what a row of the table says about the case."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "batch": self.batch,
            "context": self.context,
            "lengths": self.label,
            "q_len": self.q_len,
            "tokens": self.batch * self.q_len,
        }


@dataclass(frozen=True)
class StoreCase:
    """Storing the keys and values of ``tokens`` new tokens.

    Attributes
    ----------
    num_heads, num_kv_heads
        Query and KV heads of a layer on this GPU.
    tokens
        New tokens of all sequences together.
    """

    num_heads: int
    num_kv_heads: int
    tokens: int

    def moved_bytes(self, cell_bytes: float) -> int:
        """Bytes that have to move: the bfloat16 projection read, the bfloat16 query and the cells written."""
        numbers = 2 * self.num_heads + 2 * self.num_kv_heads
        return round(self.tokens * (2 * numbers * HEAD_DIM + self.num_kv_heads * cell_bytes))

    def columns(self) -> dict[str, object]:
        """Return what a row of the table says about the case."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "tokens": self.tokens}


@dataclass(frozen=True)
class Entry:
    """What one entrant runs in one case.

    Attributes
    ----------
    calls
        The launch under test, once per set of inputs.
    num_bytes
        What one launch has to move; None where arithmetic bounds it.
    once_per_step
        What the entrant computes once per step for all layers, or None.
    error
        ‖out − reference‖ / ‖reference‖ of a launch against float64 arithmetic on what the cache holds, or None.
    """

    calls: Sequence[Callable[[], object]]
    num_bytes: int | None
    once_per_step: Callable[[], object] | None = None
    error: Callable[[], float] | None = None


def decode_cases(*, quick: bool = False) -> list[DecodeCase]:
    """Uniform batches over the grid, then ragged ones, then several query tokens."""
    shapes, batches, contexts, q_lens = SHAPES, BATCHES, CONTEXTS, Q_LENS
    if quick:
        shapes, batches, contexts, q_lens = SHAPES[:1], (1, 8, 64), (4 * KIB, 64 * KIB), (4,)
    cases = [DecodeCase(*shape, (context,) * batch) for shape, batch, context in product(shapes, batches, contexts)]
    # Evenly spaced, in an order that no schedule can rely on: 29 and 64 share no factor.
    spread = tuple(round(KIB + 63 * KIB * (29 * i % 64) / 63) for i in range(64))
    one_long = (256 * KIB, *(4 * KIB,) * 63)
    for shape in shapes:
        cases.append(DecodeCase(*shape, one_long, "one of 256k among 63 of 4k"))
        cases.append(DecodeCase(*shape, spread, "64 from 1k to 64k"))
        cases += [DecodeCase(*shape, (64 * KIB,) * 8, q_len=q_len) for q_len in q_lens]
    return cases


def store_cases(*, quick: bool = False) -> list[StoreCase]:
    """From one decoded token to a chunk of prefill."""
    shapes, tokens = (SHAPES[:1], (1, 64, 8192)) if quick else (SHAPES, TOKENS)
    return [StoreCase(*shape, count) for shape, count in product(shapes, tokens)]


def prefill_cases(*, quick: bool = False) -> list[DecodeCase]:
    """8,192 new tokens, stored already: a prompt's first, those at the end of longer ones, and eight short prompts."""
    shapes, ends = (SHAPES[:1], (64,)) if quick else (SHAPES, (8, 64, 128))
    cases = [DecodeCase(*shape, (end * KIB,), PREFILL, 8 * KIB) for shape, end in product(shapes, ends)]
    return cases + [DecodeCase(*shape, (KIB,) * 8, PREFILL, KIB) for shape in shapes]


def sets_of_inputs(set_bytes: int) -> int:
    """How many sets of inputs to rotate among, so that L2 does not hide their traffic."""
    return min(MOST_SETS, max(1, math.ceil(ROTATED_BYTES / set_bytes)))


def shuffled_tables(
    case: DecodeCase, block_size: int, sets: int, device: torch.device
) -> tuple[int, list[torch.Tensor]]:
    """Blocks of one pool dealt out in random order.

    Returns
    -------
    tuple
        Blocks of the pool, and per set an int32 block table ``[batch, max_blocks]``, 0 behind a sequence's last block.
    """
    blocks = torch.tensor([-(-length // block_size) for length in case.seq_lens], device=device)
    used = torch.arange(int(blocks.max()), device=device) < blocks[:, None]
    per_set = int(blocks.sum())
    tables = []
    for dealt in torch.randperm(sets * per_set, dtype=torch.int32, device=device).split(per_set):
        table = torch.zeros(used.shape, dtype=torch.int32, device=device)
        table[used] = dealt
        tables.append(table)
    return sets * per_set, tables


def fill_blocks(num_blocks: int, block_bytes: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Fill a pool of blocks by repeating a random chunk, which ``make(blocks)`` returns: drawing all of it is slow."""
    chunk = make(min(num_blocks, max(1, CHUNK_BYTES // block_bytes)))
    return chunk[torch.arange(num_blocks, device=chunk.device) % len(chunk)]


def lengths(case: DecodeCase, device: torch.device) -> torch.Tensor:
    """Return the contexts as int32 ``[batch]``."""
    return torch.tensor(case.seq_lens, dtype=torch.int32, device=device)


def queries(case: DecodeCase, sets: int, device: torch.device) -> torch.Tensor:
    """Draw normal bfloat16 ``[sets, batch · q_len, num_heads, head_dim]``."""
    shape = (sets, case.batch * case.q_len, case.num_heads, HEAD_DIM)
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64."""
    reference = reference.double()
    return ((out.double() - reference).norm() / reference.norm()).item()
