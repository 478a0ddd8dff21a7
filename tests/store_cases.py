"""Inputs and bounds that the tests of norm_rotate_store share, on the CPU and on a GPU."""

from dataclasses import dataclass

import pytest
import torch

from kvlab import codec
from kvlab.kernels.folding import CODEC, REFIT, Folding, encoder
from kvlab.kernels.layout import read_cells, write_cells
from kvlab.kernels.naive.norm_rotate_store import normalise, rotate
from kvlab.kernels.store import norm_rotate_store
from kvlab.quantizers import RefitUnequalInteger, UnequalInteger
from kvlab.quantizers.base import Quantizer

EPS = 1e-3
"""Not the default, and beside the mean square of vectors of size 0.01 to 100 from large to nothing."""
QUANTIZERS = (CODEC, REFIT, UnequalInteger(16), RefitUnequalInteger(16))
"""Those that the kernels write keys by."""
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
    refit_keys: bool = False
    refit_values: bool = False
    fine: int = 0

    @property
    def id(self) -> str:
        shape = f"T={self.tokens}-H={self.num_heads}/{self.num_kv_heads}-D={self.head_dim}-B={self.block_size}"
        slots = "" if self.slots is None else f"-slots={self.slots}"
        words = ("per_head", "v_matrix", "bias", "refit_keys", "refit_values")
        words = "".join(f"-{name.replace('_', '-')}" for name in words if getattr(self, name))
        return shape + slots + words + (f"-fine={self.fine}" if self.fine else "")

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
        quantizers = [REFIT if refit else CODEC for refit in (self.refit_keys, self.refit_values)]
        q_matrix, k_matrix = 3 * matrix(), matrix()
        if self.fine:
            quantizers[0] = (RefitUnequalInteger if self.refit_keys else UnequalInteger)(self.fine)
            k_matrix, biases[0] = placed(quantizers[0], k_matrix, biases[0])
        return Folding(q_matrix, k_matrix, matrix() if self.v_matrix else None, *biases, *quantizers)

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


def placed(
    quantizer: Quantizer, k_matrix: torch.Tensor, k_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Put the rows that a key's fine channels need in both of their places."""
    placement = quantizer.placement(k_matrix.shape[-1]).to(k_matrix.device)
    return placement @ k_matrix, None if k_bias is None else k_bias @ placement.mT


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
    """Run a kernel on poisoned outputs; the cells must be the encoders' of its own numbers, and no others change."""
    qkv = case.qkv(device) if qkv is None else qkv
    slots = case.slot_mapping(device)
    memory, cache = case.cache(device)
    before = memory.clone()
    q = torch.full((case.tokens, case.num_heads, case.head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    debug = torch.full((2, case.tokens, case.num_kv_heads, case.head_dim), torch.nan, device=device)
    arguments = {**case.heads, "eps": EPS, "out": q, "debug_keys": debug[0], "debug_values": debug[1]}
    folding = case.folding(device)
    norm_rotate_store(qkv, cache, slots, folding, backend=backend, **arguments)
    if len(slots):
        stored = [cells[:, slots].transpose(0, 1) for cells in all_cells(cache)]
        for cells, numbers, quantizer in zip(stored, debug, (folding.k_quantizer, folding.v_quantizer), strict=True):
            check_encoded(cells[slots >= 0], numbers[: len(slots)][slots >= 0], quantizer)
        write_cells(case.within(before)[1], slots, *stored)
    assert torch.equal(memory, before)
    assert debug[:, len(slots) :].isnan().all()
    return Result(q, debug[0], debug[1], memory)


def all_cells(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every slot, ``[num_kv_heads, slots, head_dim / 2 + 4]`` each."""
    blocks = torch.arange(len(cache), device=cache.device)
    return read_cells(cache, blocks, cache.shape[0] * cache.shape[2])


def check_encoded(cells: torch.Tensor, x: torch.Tensor, quantizer: Quantizer) -> None:
    """Hold cells to what a quantizer encodes of the float32 vectors that they were made of.

    The codec's bytes are the same, and those of unequal bits. Those of a searched range follow from sums of d numbers,
    whose last bits depend on the order: about log2(d) 2^-24 of them. Scale and offset, rounded to fp16, whose steps are
    2^-10, then come out next to the reference's for one of a thousand vectors or fewer, and a choice between two
    candidates for fewer still. As fp16 holds the offset of a centred vector, 7.5 scales s, and the scale, which counts
    15 times, a step of both moves no number by more than 22.5 · 2^-10 s; both grids lie that near to the best, where
    the squared error is flat, so that it differs by the square of that, beside s²/12 of the rounding itself: 0.6%. 1%
    has room for the codes that flip.
    """
    expected = encoder(quantizer)(x)
    other = (cells != expected).any(-1)
    if not searched(quantizer):
        assert not other.any()
        return
    assert other.sum() <= 1 + other.numel() / 100
    plainly = CODEC if quantizer == REFIT else UnequalInteger(quantizer.fine)
    error, reference, plain = (squared_error(stored, x, quantizer) for stored in (cells, expected, encoder(plainly)(x)))
    assert (error <= 1.01 * reference).all()
    # Never worse than the codec, but for the last bits of two sums.
    assert (error <= (1 + 2**-17) * plain).all()


def searched(quantizer: Quantizer) -> bool:
    return quantizer == REFIT or isinstance(quantizer, RefitUnequalInteger)


def squared_error(cells: torch.Tensor, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """What is read errs, squared; channels that are not stored do not count."""
    read, dim = codec.decode(cells).double(), x.shape[-1]
    if not isinstance(quantizer, UnequalInteger):
        return (read - x).square().sum(-1)
    read = read @ quantizer.expansion(dim).to(read).mT
    return (read - x)[..., : dim - quantizer.fine].square().sum(-1)


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


def check_special_values(backend: str, device: str, *, head_dim: int, quantizer: Quantizer = CODEC) -> None:
    """Store special vectors as values, unrotated, and as keys; all must come back finite and leave the others alone."""
    x = special_values(head_dim).to(device)
    eye, slots = torch.eye(head_dim, device=device)[None], torch.randperm(32, device=device)[: len(x)]
    unequal = isinstance(quantizer, UnequalInteger)
    k_matrix, v_quantizer = (placed(quantizer, eye)[0], CODEC) if unequal else (eye, quantizer)
    cache = torch.randint(0, 256, (1, 1, 32, head_dim + 8), dtype=torch.uint8, device=device)
    qkv = torch.cat([x, x, x], dim=1)
    folding = Folding(eye, k_matrix, k_quantizer=quantizer, v_quantizer=v_quantizer)
    norm_rotate_store(qkv, cache, slots, folding, num_heads=1, num_kv_heads=1, eps=EPS, backend=backend)
    keys, values = (cells[0, slots] for cells in all_cells(cache))
    finite = x.isfinite().all(-1)
    check_encoded(values[finite], x[finite].float().clamp(-65504, 65504), v_quantizer)
    assert codes(x[1].float())[:6].tolist() == [0, 0, 1, 2, 2, 2]
    assert codec.decode(keys).isfinite().all()
    assert codec.decode(values).isfinite().all()
    ordinary = [0, 2, 7, 9, 13, 15]
    normal = normalise(x[ordinary].double(), EPS)
    keys = codec.decode(keys[ordinary]).double()
    if unequal:
        stored = torch.arange(head_dim, device=device) < head_dim - quantizer.fine
        keys, normal = keys @ quantizer.expansion(head_dim).to(keys).mT * stored, normal * stored
    # Half a step, and what fp16 takes from the offset and from 15 scales, both below 8.
    bound = (normal.amax(-1) - normal.amin(-1)) / 30 + 2 * 8 * 2**-11
    assert ((keys - normal).square().sum(-1) <= head_dim * bound**2).all()
    if not searched(quantizer):
        assert ((keys - normal).abs() <= bound[:, None]).all()
