"""Any invertible matrix as a transform: keys by A, queries by its inverse transpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvlab.checks import check_finite, check_vectors
from kvlab.transforms.base import Transform
from kvlab.transforms.parameters import check_layers, of_layer

LARGEST_CONDITION = 2.0**13
"""Keys and queries rounded to float32 cost up to 2⁻²⁴ · condition of a score: here no more than 2⁻¹¹, half of what
rounding the query to fp16 and a quarter of what rounding it to BF16 may."""

ORTHOGONAL_TOLERANCE = 2.0**-23
"""Rounding to float32 moves an entry of Q Qᵀ by up to 2 · 2⁻²⁵ Σ |a b| ≤ 2⁻²⁴ (Cauchy–Schwarz); twice that."""

LARGEST_ORDER = 512
"""Up to here sums of products in `ExactProduct` are integers of at most 9 + 27 + 17 = 53 bits."""

VECTOR_BITS, PART_BITS = 27, 17


@dataclass(frozen=True, eq=False)
class ExactProduct:
    """A matrix ready for products that are the same bits on any machine, however it orders its additions.

    Floating-point sums depend on their order, but integers below 2⁵³ add up exactly in float64. So vectors are
    rounded to 2⁻²⁷ of the power of two above their largest component (float32 itself keeps no more of that
    component), and the matrix is split into two parts of 17 bits. Both products are then exact; their sum is rounded
    once to float64 and once to float32.

    Attributes
    ----------
    high, low
        float64 ``[..., head_dim, head_dim]``; their sum is the matrix up to 2⁻³⁶ of its largest entry.
    """

    high: torch.Tensor
    low: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> ExactProduct:
        """Split ``matrix``, ``[..., head_dim, head_dim]``, each of the leading dimensions on its own grid."""
        matrix = matrix.double()
        high = _round_to_bits(matrix, PART_BITS, dims=(-2, -1))
        # Rounding leaves less than half a unit of the high part, whose 17 further bits the low part takes.
        unit = _power_above(matrix, dims=(-2, -1)) * 2.0**-PART_BITS
        low = ((matrix - high) / unit * 2.0 ** (PART_BITS + 1)).round() * unit * 2.0 ** -(PART_BITS + 1)
        return cls(high, low)

    def heads(self, group_size: int) -> ExactProduct:
        """Repeat every head's matrix for the ``group_size`` query heads that read it."""
        return ExactProduct(*(part.repeat_interleave(group_size, dim=0) for part in (self.high, self.low)))

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply vectors (rows) by the matrix: x Aᵀ, float32, tokens side by side in memory."""
        columns = _round_to_bits(x.double(), VECTOR_BITS, dims=(-1,))
        columns = columns.mT if x.ndim > 1 else columns
        high, low = (part.to(x.device) @ columns for part in (self.high, self.low))
        product = high.add_(low).float()
        return product.mT if x.ndim > 1 else product


class Matrix(Transform):
    """Keys times an invertible matrix, y = A x; queries times its inverse transpose, A⁻ᵀ q.

    (A⁻ᵀ q) · (A x) = q · x for any invertible A, so rotations are only one choice. What is quantized is the same on
    any machine, bit for bit (`ExactProduct`); A⁻¹ is computed once, in float64.

    Parameters
    ----------
    matrices
        A: ``[head_dim, head_dim]`` or ``[num_kv_heads, head_dim, head_dim]``, any float dtype; or a mapping from
        layer to such tensors. Per head, keys are ``[..., num_kv_heads, tokens, head_dim]`` and queries ``[...,
        num_heads, tokens, head_dim]``, num_heads a multiple of num_kv_heads.
    name
        The argument's name in errors.

    Raises
    ------
    TypeError, ValueError
        ``matrices`` is of another type or shape, is not finite, of an order beyond 512, or so ill-conditioned that
        float32 would no longer keep scores.
    """

    def __init__(self, matrices: torch.Tensor | Mapping[int, torch.Tensor], name: str = "matrices") -> None:
        self.name = name
        if isinstance(matrices, Mapping):
            layers = check_layers(matrices, name)
            self.matrices = {layer: _checked(value, f"{name}[{layer}]") for layer, value in layers.items()}
            self._maps = {layer: self._prepare(m, f"{name}[{layer}]") for layer, m in self.matrices.items()}
        else:
            self.matrices = _checked(matrices, name)
            self._maps = self._prepare(self.matrices, name)

    def _prepare(self, matrix: torch.Tensor, name: str) -> tuple[ExactProduct, ExactProduct, ExactProduct]:
        """Forward, inverse and query products of one layer."""
        inverse = self._invert(matrix.double(), name)
        return ExactProduct.of(matrix), ExactProduct.of(inverse), ExactProduct.of(inverse.mT)

    def _invert(self, matrix: torch.Tensor, name: str) -> torch.Tensor:
        condition = torch.linalg.cond(matrix).max().item()
        if not condition <= LARGEST_CONDITION:
            raise ValueError(f"{name} has condition number {condition:.3g}; accepted: at most {LARGEST_CONDITION:g}")
        return torch.linalg.inv(matrix)

    def num_kv_heads(self, layer: int = 0) -> int | None:
        """Heads that the matrices of ``layer`` tell apart; None where all heads share one."""
        matrix = of_layer(self.matrices, layer, self.name)
        return matrix.shape[0] if matrix.ndim == 3 else None

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Multiply keys by A."""
        return self._product(0, x, "x", layer)

    def inverse(self, y: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Multiply keys by A⁻¹."""
        return self._product(1, y, "x", layer)

    def query(self, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Multiply queries by A⁻ᵀ of the KV head that they read."""
        return self._product(2, q, "q", layer)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where the matrices have another order."""
        values = self.matrices.values() if isinstance(self.matrices, dict) else [self.matrices]
        known = sorted({value.shape[-1] for value in values})
        if head_dim not in known:
            raise ValueError(f"head_dim is {head_dim}; accepted: that of {self.name}, {', '.join(map(str, known))}")

    def _product(self, which: int, x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        product = of_layer(self._maps, layer, self.name)[which]
        num_kv_heads = self.num_kv_heads(layer)
        check_vectors(x, name, head_dim=product.high.shape[-1], min_ndim=1 if num_kv_heads is None else 3)
        if num_kv_heads is None:
            return product(x)
        group_size, rest = divmod(x.shape[-3], num_kv_heads)
        if rest or (name == "x" and group_size != 1):
            accepted = f"{'a multiple of ' if name == 'q' else ''}the {num_kv_heads} KV heads of {self.name}"
            raise ValueError(f"{name} has {x.shape[-3]} heads (its third-last dimension); accepted: {accepted}")
        return (product if group_size == 1 else product.heads(group_size))(x)

    def __repr__(self) -> str:
        shown = f"layers {', '.join(map(str, self.matrices))}" if isinstance(self.matrices, dict) else None
        return f"{type(self).__name__}(<{shown or list(self.matrices.shape)}>)"


class OrthogonalMatrix(Matrix):
    """Keys and queries times the same orthogonal matrix.

    Parameters
    ----------
    matrices
        As in `Matrix`, with Q Qᵀ = I up to rounding to float32.

    Raises
    ------
    TypeError, ValueError
        As in `Matrix`, or an entry of Q Qᵀ − I is beyond 2⁻²³.
    """

    def _invert(self, matrix: torch.Tensor, name: str) -> torch.Tensor:
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        off = (matrix @ matrix.mT - identity).abs().max().item()
        if off > ORTHOGONAL_TOLERANCE:
            accepted = f"an orthogonal matrix, to {ORTHOGONAL_TOLERANCE:.3g} (compute it in float64)"
            raise ValueError(f"{name} has an entry of Q Qᵀ − I of {off:.3g}; accepted: {accepted}")
        return matrix.mT


def _checked(matrix: torch.Tensor, name: str) -> torch.Tensor:
    shape = list(check_vectors(matrix, name, min_ndim=2).shape)
    if len(shape) > 3 or shape[-1] != shape[-2] or shape[-1] > LARGEST_ORDER:
        accepted = f"[head_dim, head_dim] or [num_kv_heads, head_dim, head_dim], head_dim at most {LARGEST_ORDER}"
        raise ValueError(f"{name} has shape {shape}; accepted: {accepted}")
    return check_finite(matrix.detach().to(torch.float32, copy=True), name)


def _power_above(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Power of two above the largest magnitude along ``dims``, which are kept."""
    _, exponent = torch.frexp(x.abs().amax(dims, keepdim=True))
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


def _round_to_bits(x: torch.Tensor, bits: int, dims: tuple[int, ...]) -> torch.Tensor:
    """Round float64 ``x`` to 2^-bits of `_power_above`; dividing by a power of two is exact."""
    unit = _power_above(x, dims) * 2.0**-bits
    return (x / unit).round_().mul_(unit)
