"""Inputs and bounds that the tests of norm_rotate_store share, on the CPU and on a GPU."""

from dataclasses import dataclass

import pytest
import torch

from kvlab import codec
from kvlab.kernels.folding import Folding
from kvlab.kernels.layout import read_cells, write_cells
from kvlab.kernels.naive.norm_rotate_store import normalise, rotate
from kvlab.kernels.store import norm_rotate_store

EPS = 1e-3
"""Not the default, and beside the mean square of vectors of size 0.01 to 100 from large to nothing."""
PADDING = 48
"""Bytes between the blocks of a cache, a multiple of 16."""


@dataclass(frozen=True)
class Case:
    """One shape; ``slots`` is how many tokens have one, all if None, and every seventh of these is skipped."""

    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 32
    slots: int | None = None
    per_head: bool = True
    v_matrix: bool = False
    bias: bool = True

    @property
    def id(self) -> str:
        shape = f"T={self.tokens}-H={self.num_heads}/{self.num_kv_heads}-D={self.head_dim}-B={self.block_size}"
        slots = "" if self.slots is None else f"-slots={self.slots}"
        words = (("per_head", "per-head"), ("v_matrix", "v-matrix"), ("bias", "bias"))
        return shape + slots + "".join(f"-{word}" for name, word in words if getattr(self, name))

    @property
    def heads(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}

    def folding(self, device: str = "cpu") -> Folding:
        generator = torch.Generator().manual_seed(self.tokens)
        matrices = self.num_kv_heads if self.per_head else 1

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        def matrix() -> torch.Tensor:
            return random(matrices, self.head_dim, self.head_dim) * self.head_dim**-0.5

        biases = [random(self.num_kv_heads, self.head_dim) if self.bias else None for _ in range(2)]
        return Folding(3 * matrix(), matrix(), matrix() if self.v_matrix else None, *biases)

    def qkv(self, device: str = "cpu") -> torch.Tensor:
        """Vectors of sizes from 0.01 to 100, rows farther apart than they are long."""
        generator = torch.Generator().manual_seed(self.tokens + 1)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        x = torch.randn(self.tokens, width + 8, generator=generator)
        return (x * 10 ** (4 * torch.rand(self.tokens, 1, generator=generator) - 2)).bfloat16().to(device)[:, :width]

    def slot_mapping(self, device: str = "cpu") -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.tokens + 2)
        slots = torch.randperm(self._blocks * self.block_size, generator=generator)[: self.tokens]
        slots[6::7] = -1
        return slots[: self.slots].to(device)

    def cache(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Random bytes, padding between the blocks included; and the cache within them."""
        dense = self.num_kv_heads * self.block_size * (self.head_dim + 8)
        generator = torch.Generator().manual_seed(self.tokens + 3)
        poison = torch.randint(0, 256, (self._blocks, dense + PADDING), dtype=torch.uint8, generator=generator)
        return self.within(poison.to(device))

    def within(self, poison: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.num_kv_heads, self.block_size, self.head_dim + 8)
        return poison, poison[:, :-PADDING].unflatten(1, shape)

    @property
    def _blocks(self) -> int:
        return -(-self.tokens // self.block_size) + 2


def cases(*items: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", items, ids=lambda case: case.id)


@dataclass(frozen=True)
class Result:
    """What a backend returned and wrote."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    memory: torch.Tensor


def run(case: Case, backend: str, *, device: str = "cpu", qkv: torch.Tensor | None = None) -> Result:
    """Run a kernel on poisoned outputs; the bytes must be the codec's of its own numbers, and no others change."""
    qkv = case.qkv(device) if qkv is None else qkv
    slots = case.slot_mapping(device)
    memory, cache = case.cache(device)
    before = memory.clone()
    q = torch.full((case.tokens, case.num_heads, case.head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    debug = torch.full((2, case.tokens, case.num_kv_heads, case.head_dim), torch.nan, device=device)
    arguments = {**case.heads, "eps": EPS, "out": q, "debug_keys": debug[0], "debug_values": debug[1]}
    norm_rotate_store(qkv, cache, slots, case.folding(device), backend=backend, **arguments)
    if len(slots):
        written = debug[:, : len(slots)]
        write_cells(case.within(before)[1], slots, codec.encode(written[0]), codec.encode(written[1]))
    assert torch.equal(memory, before)
    assert debug[:, len(slots) :].isnan().all()
    return Result(q, debug[0], debug[1], memory)


def check_near_twin(case: Case, result: Result, *, device: str = "cpu", q_ratio: float) -> None:
    """Hold queries, keys, values and their codes to the twin in float64.

    ``q_ratio`` bounds the error of the queries, in errors of the twin's queries rounded to bfloat16. Keys and values
    are float32: each of the d additions of a sum leaves about 2^-24, at random, so sqrt(d) 2^-24 = 1e-6 at d = 256;
    3e-6 has room for tensor cores, which truncate. A matrix rounded to fp16 once would leave 1e-4.
    """
    q, *exact = rotate(case.qkv(device), case.folding(device), **case.heads, eps=EPS)
    assert relative_error(result.q, q) <= q_ratio * relative_error(q.bfloat16(), q)
    slots = len(case.slot_mapping())
    for ours, twin in zip((result.keys, result.values), exact, strict=True):
        if slots:
            assert relative_error(ours[:slots], twin[:slots]) < 3e-6
            difference = (codes(ours[:slots]) - codes(twin[:slots])).abs()
            assert difference.max() <= 1
            assert difference.float().mean() <= 0.01


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


def codes(x: torch.Tensor) -> torch.Tensor:
    packed = codec.encode(x)[..., :-4].short()
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def special_values(head_dim: int) -> torch.Tensor:
    """Values of 16 tokens: ties, constants, zeros, tiny, huge, not finite, and plain ones between them."""
    x = torch.randn(16, head_dim)
    # Scale 1, and half of the codes are ties.
    x[1] = torch.arange(head_dim) % 31 / 2
    x[3], x[4], x[5] = 3.14159, 0.0, -0.0
    x[6] = 1e-9 * x[6]
    x[8, :2] = torch.tensor([1e5, -3e38])
    x[10, 7], x[11, 7], x[12] = torch.nan, -torch.inf, torch.nan
    x[14] = 1e5
    return x.bfloat16()


def check_special_values(backend: str, device: str, *, head_dim: int) -> None:
    """Store special vectors as values, unrotated, and as keys; all must come back finite and leave the others alone."""
    x = special_values(head_dim).to(device)
    eye, slots = torch.eye(head_dim, device=device)[None], torch.randperm(32, device=device)[: len(x)]
    cache = torch.randint(0, 256, (1, 1, 32, head_dim + 8), dtype=torch.uint8, device=device)
    qkv = torch.cat([x, x, x], dim=1)
    norm_rotate_store(qkv, cache, slots, Folding(eye, eye), num_heads=1, num_kv_heads=1, eps=EPS, backend=backend)
    keys, values = (
        cells[0, slots] for cells in read_cells(cache, torch.zeros(1, dtype=torch.int64, device=device), 32)
    )
    finite = x.isfinite().all(-1)
    assert torch.equal(values[finite], codec.encode(x[finite].float().clamp(-65504, 65504)))
    assert codes(x[1].float())[:6].tolist() == [0, 0, 1, 2, 2, 2]
    assert codec.decode(keys).isfinite().all()
    assert codec.decode(values).isfinite().all()
    ordinary = [0, 2, 7, 9, 13, 15]
    normal = normalise(x[ordinary].double(), EPS)
    # Half a step, and what fp16 takes from the offset and from 15 scales, both below 8.
    bound = (normal.amax(-1) - normal.amin(-1)) / 30 + 2 * 8 * 2**-11
    assert ((codec.decode(keys[ordinary]) - normal).abs() <= bound[:, None]).all()
