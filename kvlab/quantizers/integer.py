"""Asymmetric integers: the arithmetic of the 4-bit codec, for any number of bits and any group."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvlab.checks import check_choice
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import Granularity, PerGroup, PerTokenHead, check_granularity
from kvlab.quantizers.rounding import divide, divide_or_zero_, to_fp16

INTEGER_BITS = (2, 3, 4, 8)


def quantize_asymmetric(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and offset of float32 groups ``[..., group]``.

    o = fp16(min x), s = fp16(max(max x − o, 0) / (2^bits − 1)), codes = round((x − o)/s) clamped to
    0 … 2^bits − 1, ties to even, and 0 where s = 0.

    Returns
    -------
    codes : torch.Tensor
        ``[..., group]``, integers held in float32, in the memory layout of ``x``.
    scale, offset : torch.Tensor
        ``[..., 1]``, fp16 values held in float32.
    """
    largest_code = 2**bits - 1
    # Adding 0 makes the zero positive: whether a minimum over ±0 finds −0 depends on the order.
    offset = to_fp16(x.amin(dim=-1, keepdim=True) + 0.0)
    highest = x.amax(dim=-1, keepdim=True)
    span = torch.where(highest > offset, highest - offset, 0.0)
    scale = to_fp16(divide(span, largest_code))
    codes = divide_or_zero_(x - offset, scale).round_().clamp_(0, largest_code)
    return codes, scale, offset


def dequantize_asymmetric_(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Turn float32 ``codes`` into o + s·code in place; s·code is exact, so fused or not is the same."""
    # A tiny negative minimum is −0 in fp16; adding 0 gives x̂ one sign of zero, whatever that of a code 0.
    return codes.mul_(scale).add_(offset + 0.0)


@dataclass(frozen=True)
class AsymmetricInteger(Quantizer):
    """Integers between the smallest and the largest number of a group, with fp16 scale and offset.

    Per token and head at 4 bits it is the codec of `kvlab.codec`, number for number. A constant
    group returns to the fp16 rounding of its value.

    Parameters
    ----------
    bits
        2, 3, 4 or 8.
    granularity
        `PerTokenHead` or `PerGroup`.

    Raises
    ------
    ValueError
        ``bits`` is none of these.
    TypeError
        ``granularity`` is of another type.
    """

    bits: int = 4
    granularity: Granularity = field(default=PerTokenHead())

    def __post_init__(self) -> None:
        check_choice(self.bits, "bits", INTEGER_BITS)
        check_granularity(self.granularity, PerTokenHead, PerGroup)

    def bits_per_number(self, head_dim: int) -> float:
        """``bits`` and, per group, 32 for scale and offset."""
        return self.bits + self.granularity.overhead(32, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.granularity.split(x)
        return dequantize_asymmetric_(*quantize_asymmetric(groups, self.bits)).reshape(x.shape)
