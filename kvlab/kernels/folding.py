"""What stands between a layer's QK-norm and its 4-bit cache: fixed matrices, and the quantizers that write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlab import codec
from kvlab.checks import check_finite, check_vectors
from kvlab.quantizers import AsymmetricInteger, RefitInteger, RefitUnequalInteger, UnequalInteger
from kvlab.quantizers.base import Quantizer

_LARGEST_EXPONENT = 15
"""Matrices are scaled by a power of two to just below 2^15: fp16 then holds 11 bits of all but the tiniest entries."""

CODEC, REFIT = AsymmetricInteger(4), RefitInteger()
"""Quantizers that the kernels write; of keys `UnequalInteger` too. All their bytes are read by `kvlab.codec.decode`."""


@dataclass(frozen=True, eq=False)
class Fragments:
    """A matrix as the tensor cores read it: fp16 numbers times a power of two, in the order of the CUDA kernel's lanes.

    Attributes
    ----------
    terms
        float16 ``[num_kv_heads or 1, 2, head_dim²]``: the rounded matrix and what the rounding left, 22 bits together.
    unscale
        What a product with them must be multiplied with.
    """

    terms: torch.Tensor
    unscale: float

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Fragments:
        """Split and order float32 ``[num_kv_heads or 1, head_dim, head_dim]``."""
        exponent = _LARGEST_EXPONENT - math.frexp(matrix.abs().max().item())[1]
        scaled = matrix.double() * 2.0**exponent
        high = scaled.half()
        terms = torch.stack([high, (scaled - high.double()).half()], dim=1)
        # Row 32·quarter + 8·t + 2·j + e, column 32·c + 8·u + r. Lane 4·(2·t + e) + u reads 8 columns r at once.
        pieces = terms.unflatten(3, (-1, 4, 8)).unflatten(2, (-1, 4, 4, 2))  # head term quarter t j e c u r
        return cls(pieces.permute(0, 1, 2, 6, 4, 3, 5, 7, 8).flatten(2).contiguous(), math.ldexp(1.0, -exponent))


@dataclass(frozen=True, eq=False)
class Folding:
    """What stands between a layer's qkv projection and its 4-bit cache; n is the RMS-norm without gain.

    rotated q = q_matrix · n(q), key = k_matrix · n(k) + k_bias, value = v_matrix · v + v_bias, vectors as columns. The
    gains of the norms are inside the matrices (for rotating what is cached: QuaRot, Ashkboos et al. 2024,
    arXiv:2404.00456).

    Parameters
    ----------
    q_matrix, k_matrix
        float32 ``[num_kv_heads or 1, head_dim, head_dim]``; 1 is shared by all heads. The query heads of a group use
        the matrix of their KV head.
    v_matrix
        The same, or None for values as they are.
    k_bias, v_bias
        float32 ``[num_kv_heads, head_dim]``, or None.
    k_quantizer, v_quantizer
        `CODEC`, or `REFIT`, which searches scale and offset. Keys may be stored by an `UnequalInteger`: rows of
        ``k_matrix`` and ``k_bias`` are then `UnequalInteger.placement`'s, and q_matrix has its expansion transposed.

    Attributes
    ----------
    q_fragments, k_fragments, v_fragments : Fragments or None
        The matrices as the CUDA kernel reads them, made once.

    Raises
    ------
    TypeError
        A matrix or bias is no float32 tensor, or a quantizer is none.
    ValueError
        A shape or device does not fit ``q_matrix``'s, a component is not finite, a quantizer is none of these, or keys
        of unequal bits are not placed as it needs them.
    """

    q_matrix: torch.Tensor
    k_matrix: torch.Tensor
    v_matrix: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    k_quantizer: Quantizer = CODEC
    v_quantizer: Quantizer = CODEC
    q_fragments: Fragments = field(init=False, repr=False)
    k_fragments: Fragments = field(init=False, repr=False)
    v_fragments: Fragments | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_key_quantizer(self.k_quantizer, "k_quantizer")
        check_quantizer(self.v_quantizer, "v_quantizer")
        for name in ("q_matrix", "k_matrix", "v_matrix", "k_bias", "v_bias"):
            x = getattr(self, name)
            if isinstance(x, torch.Tensor) and (x.is_meta or x.layout != torch.strided):
                raise ValueError(f"{name} is a {x.layout} tensor on {x.device}; accepted: a dense tensor with memory")
        check_vectors(self.q_matrix, "q_matrix", min_ndim=3)
        for name in ("q_matrix", "k_matrix", "v_matrix", "k_bias", "v_bias"):
            x = getattr(self, name)
            if x is not None or name in ("q_matrix", "k_matrix"):
                self._check(x, name, ndim=2 if name.endswith("bias") else 3)
                object.__setattr__(self, name, x.contiguous())
        self._check_placement()
        for name in ("q_matrix", "k_matrix", "v_matrix"):
            matrix = getattr(self, name)
            fragments = None if matrix is None else Fragments.of(matrix)
            object.__setattr__(self, name.replace("matrix", "fragments"), fragments)
        if self.q_matrix.is_cuda:
            # The CUDA kernel reads them without waiting for what the stream has still to do.
            torch.cuda.current_stream(self.q_matrix.device).synchronize()

    @property
    def refits(self) -> tuple[bool, bool]:
        """Whether scale and offset of keys, and whether those of values, are searched."""
        keys = self.k_quantizer == REFIT or isinstance(self.k_quantizer, RefitUnequalInteger)
        return keys, self.v_quantizer == REFIT

    @property
    def fine(self) -> int:
        """Channels of the keys with eight bits, and with none."""
        return self.k_quantizer.fine if isinstance(self.k_quantizer, UnequalInteger) else 0

    @property
    def head_dim(self) -> int:
        """Numbers of one vector."""
        return self.q_matrix.shape[-1]

    def check_heads(self, num_kv_heads: int) -> Folding:
        """Check that all is for ``num_kv_heads`` heads, or matrices shared, and return the folding itself.

        Raises
        ------
        ValueError
            A matrix or bias has another number of heads.
        """
        for name in ("q_matrix", "k_matrix", "v_matrix", "k_bias", "v_bias"):
            x = getattr(self, name)
            accepted = {num_kv_heads} if name.endswith("bias") else {1, num_kv_heads}
            if x is not None and len(x) not in accepted:
                raise ValueError(f"{name} has {len(x)} heads; accepted: {' or '.join(map(str, sorted(accepted)))}")
        return self

    def _check_placement(self) -> None:
        if not self.fine:
            return
        # Refuses more than the half.
        self.k_quantizer.bits_per_number(self.head_dim)
        for name, rows in (("k_matrix", self.k_matrix), ("k_bias", self.k_bias)):
            if rows is not None and not torch.equal(rows[:, : self.fine], rows[:, -self.fine :]):
                raise ValueError(f"{name} has other rows last than first; accepted with {self.k_quantizer!r}: the same")

    def _check(self, x: object, name: str, *, ndim: int) -> None:
        check_vectors(x, name, head_dim=self.head_dim, min_ndim=ndim)
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; accepted: torch.float32")
        if x.ndim != ndim or (ndim == 3 and x.shape[1] != self.head_dim):
            accepted = "[num_kv_heads or 1, head_dim, head_dim]" if ndim == 3 else "[num_kv_heads, head_dim]"
            raise ValueError(f"{name} has shape {list(x.shape)}; accepted: {accepted} with head_dim {self.head_dim}")
        if x.device != self.q_matrix.device:
            raise ValueError(f"{name} is on {x.device}; accepted: {self.q_matrix.device}, where q_matrix is")
        check_finite(x, name)


def encoder(quantizer: Quantizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what a quantizer that the kernels write does to vectors, in plain torch: their bytes."""
    return codec.encode if quantizer == CODEC else quantizer.encode


def check_key_quantizer(quantizer: object, name: str) -> None:
    """Check that the kernels write what ``quantizer`` stores of keys; raises as `check_quantizer`."""
    if not isinstance(quantizer, UnequalInteger):
        check_quantizer(quantizer, name, f"{CODEC!r}, {REFIT!r} or an {UnequalInteger.__name__}")


def check_quantizer(quantizer: object, name: str, accepted: str = f"{CODEC!r} or {REFIT!r}") -> None:
    """Check that the kernels write what ``quantizer`` stores.

    Raises
    ------
    TypeError
        It is no quantizer.
    ValueError
        It is none of `CODEC` and `REFIT`.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"{name} is a {type(quantizer).__name__}; accepted: a kvlab quantizer")
    if quantizer not in (CODEC, REFIT):
        raise ValueError(f"{name} is {quantizer!r}; accepted: {accepted}")
