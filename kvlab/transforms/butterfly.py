"""Hadamard rotations in a fixed order of additions: the same bits on any IEEE machine."""

from __future__ import annotations

import torch

from kvlab.transforms.hadamard_matrix import hadamard_core


@torch.no_grad()
def rotate(x: torch.Tensor, factors: torch.Tensor, core_order: int, power: int, *, inverse: bool) -> torch.Tensor:
    """Multiply rows by the transpose of R = (I ⊗ core ⊗ Sylvester) · diag(factors), or back by R.

    The order of operations is part of the definition: times the factors; core columns 0, 1, 2, … added
    up; butterflies of strides 1, 2, 4, …, each (a, b) → (a + b, a − b). The way back multiplies by the
    factors last and by the core's transpose. All other products are with ±1, thus exact.

    Parameters
    ----------
    x
        ``[n, dim]`` float32; dim a multiple of core_order · power.
    factors
        ``[dim, 1]`` float32, each ±1/√(core_order · power).
    core_order, power
        Orders of the constructed core and of the Sylvester matrix.
    inverse
        Whether to go back.

    Returns
    -------
    torch.Tensor
        New float32 ``[n, dim]``, a view of contiguous ``[dim, n]``: additions run along vectors laid side by
        side, and a quantizer and the way back find them so.
    """
    core = hadamard_core(core_order)
    columns = x.t().contiguous()
    if inverse:
        return (_multiply(columns, core.T, power) * factors).t()
    return _multiply(columns * factors, core, power).t()


def _multiply(x: torch.Tensor, core: torch.Tensor, power: int) -> torch.Tensor:
    """Compute (I ⊗ core ⊗ Sylvester_power) x for a contiguous ``[dim, n]``, without writing to it."""
    # Two buffers take turns.
    buffers = [torch.empty_like(x), torch.empty_like(x)]
    if len(core) > 1:
        _multiply_core(x, core, power, out=buffers[0])
        x, buffers = buffers[0], buffers[::-1]
    stride = 1
    while stride < power:
        a, b = x.view(-1, 2, stride * x.shape[1]).unbind(1)
        sums, differences = buffers[0].view(-1, 2, stride * x.shape[1]).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        x, buffers = buffers[0], buffers[::-1]
        stride *= 2
    return x


def _multiply_core(x: torch.Tensor, core: torch.Tensor, power: int, *, out: torch.Tensor) -> None:
    """Write (I ⊗ core ⊗ I_power) x to ``out``, adding the core's columns from the first to the last."""
    columns, rows = (tensor.view(-1, len(core), power * x.shape[1]).unbind(1) for tensor in (x, out))
    for row, (first, *others) in zip(rows, core.tolist(), strict=True):
        torch.mul(columns[0], first, out=row)
        for column, sign in zip(columns[1:], others, strict=True):
            row.add_(column, alpha=sign)
