"""KIVI's keys: integers per channel over blocks of tokens, recent tokens exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.checks import check_choice, check_integer
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.integer import INTEGER_BITS, dequantize_asymmetric_, quantize_asymmetric


@dataclass(frozen=True)
class PerChannelInteger(Quantizer):
    """Asymmetric integers per channel over blocks of tokens (Liu et al. 2024, arXiv:2402.02750).

    Tokens are quantized ``residual`` at a time, once that many have gathered; the remainder, context
    modulo ``residual``, is still exact. Tokens of a block share their metadata, so the whole context
    is needed at once. The queries of a prefill read blocks as they are stored at its end, also those not
    full at the query's own time: there prefill differs from decoding, which read such keys exact.

    Parameters
    ----------
    bits
        2, 3, 4 or 8.
    group_tokens
        Tokens that share the fp16 scale and offset of a channel.
    residual
        Length of the buffer of exact recent tokens, a multiple of ``group_tokens``.

    Raises
    ------
    TypeError, ValueError
        ``bits`` is none of these, or a length is no positive integer or no such multiple.
    """

    bits: int = 4
    group_tokens: int = 32
    residual: int = 128

    per_token = False

    def __post_init__(self) -> None:
        check_choice(self.bits, "bits", INTEGER_BITS)
        check_integer(self.group_tokens, "group_tokens", minimum=1)
        if check_integer(self.residual, "residual", minimum=1) % self.group_tokens:
            accepted = f"a positive multiple of group_tokens, {self.group_tokens}"
            raise ValueError(f"residual is {self.residual}; accepted: {accepted}")

    def bits_per_number(self, head_dim: int) -> float:
        """``bits`` and, per channel and block, 32 for scale and offset.

        The exact remainder is not counted: its share vanishes as the context grows.
        """
        return self.bits + 32 / self.group_tokens

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        stored = x.shape[-2] - x.shape[-2] % self.residual
        if stored == 0:
            return x.clone()
        channels = x[..., :stored, :].transpose(-1, -2)
        blocks = channels.unflatten(-1, (-1, self.group_tokens))
        quantized = dequantize_asymmetric_(*quantize_asymmetric(blocks, self.bits)).reshape(channels.shape)
        return torch.cat([quantized.transpose(-1, -2), x[..., stored:, :]], dim=-2)
