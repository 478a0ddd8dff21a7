"""Paged 4-bit caches of random tokens on pages in random order, poisoned wherever no token lies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvlab import codec
from kvlab.kernels.layout import write_cells

FP16_NAN, FP16_INF = 0x7E00, 0x7C00
NO_BLOCK = 2**31 - 1


@dataclass(frozen=True)
class DecodeCase:
    lengths: tuple[int, ...]
    q_len: int = 1
    group: int = 12
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 32
    padding: int = 0  # bytes behind each block

    def __str__(self):
        lengths = "-".join(map(str, self.lengths))
        heads = f"{self.group * self.num_kv_heads}/{self.num_kv_heads}x{self.head_dim}"
        padding = f"+{self.padding}" if self.padding else ""
        return f"tokens={lengths},q_len={self.q_len},heads={heads},block={self.block_size}{padding}"

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, device="cpu", *, poison=FP16_NAN, value_std=1.0, q_std=1.0, q_dtype=torch.bfloat16, seed=0):
        """Draw queries and tokens; ``poison`` is the fp16 number that fills every byte pair nobody writes."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        needed = [-(-length // self.block_size) for length in self.lengths]
        # Two blocks belong to nobody, and a row of the table ends in blocks that do not exist.
        order = torch.randperm(sum(needed) + 2, generator=generator)[: sum(needed)].split(needed)
        block_table = torch.full((len(needed), max(needed) + 1), NO_BLOCK, dtype=torch.int32)
        for row, blocks in zip(block_table, order, strict=True):
            row[: len(blocks)] = blocks
        slots = [
            blocks.repeat_interleave(self.block_size)[:length] * self.block_size
            + torch.arange(length) % self.block_size
            for blocks, length in zip(order, self.lengths, strict=True)
        ]
        shape = (self.num_kv_heads, self.block_size, self.head_dim + 8)
        size = math.prod(shape)
        blocks = torch.empty(sum(needed) + 2, size + self.padding, dtype=torch.uint8, device=device)
        blocks.view(torch.int16).fill_(poison)
        cache = blocks[:, :size].unflatten(1, shape)
        keys, values = (normal(sum(self.lengths), self.num_kv_heads, self.head_dim) for _ in range(2))
        keys, values = codec.encode(keys), codec.encode(values * value_std)
        write_cells(cache, torch.cat(slots).to(device), keys, values)
        q = normal(len(self.lengths) * self.q_len, self.num_heads, self.head_dim) * q_std
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return DecodeInputs(q.to(q_dtype), cache, block_table.to(device), lengths, keys=keys, values=values)


@dataclass
class DecodeInputs:
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: torch.Tensor = field(kw_only=True)
    values: torch.Tensor = field(kw_only=True)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What every decode attention takes first."""
        return self.q, self.cache, self.block_table, self.seq_lens


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """‖result − reference‖ / ‖reference‖; NaN anywhere makes it NaN, which no bound accepts."""
    return ((result.double() - reference).norm() / reference.norm()).item()
