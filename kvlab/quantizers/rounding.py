"""Rounding to small number formats, and arithmetic that gives the same bits on every device."""

from __future__ import annotations

import torch

FP8_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_MAX = 6.0


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide by a number, correctly rounded: CUDA multiplies by the reciprocal of a Python scalar."""
    return x / torch.full_like(x, divisor)


def divide_or_zero(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide finite ``x`` by scales ``[..., 1]``; where a scale is 0 the quotient is 0."""
    return x / scale.masked_fill(scale == 0, torch.inf)


def divide_or_zero_(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`divide_or_zero`, in place."""
    return x.div_(scale.masked_fill(scale == 0, torch.inf))


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to fp16, ties to even, and return it as float32."""
    return x.half().float()


def to_fp8(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Round float32 to an `FP8_TYPES` format, ties to even, saturating, and return it as float32."""
    dtype = FP8_TYPES[kind]
    # The cast alone does not saturate: e4m3 would give NaN beyond 464 and e5m2 infinity.
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).float()


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 4-bit float e2m1 (0, ½, 1, 1½, 2, 3, 4, 6), ties to even, saturating at 6."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    # Neighbours are ½ apart below 2, 1 below 4, 2 above: an even multiple has an even mantissa.
    step = 0.5 * (1 + (magnitude >= 2) + 2.0 * (magnitude >= 4))
    return (x / step).round_().mul_(step)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum float32 ``[..., n]`` to ``[..., 1]`` in one fixed order.

    The upper half is added to the lower until one number is left; of an odd n the middle one stays alone.
    """
    while (width := x.shape[-1]) > 1:
        keep = (width + 1) // 2
        folded = x[..., :keep].clone()
        folded[..., : width - keep] += x[..., keep:]
        x = folded
    return x


def vector_norm(x: torch.Tensor) -> torch.Tensor:
    """Euclidean norm ``[..., 1]`` of float32 vectors ``[..., head_dim]``, summed in one fixed order."""
    return ordered_sum(x.square()).sqrt_()
