"""No quantizer at all: a 16-bit cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.checks import check_choice
from kvlab.quantizers.base import Quantizer


@dataclass(frozen=True)
class Cast(Quantizer):
    """Numbers rounded to a 16-bit float, ties to even.

    Parameters
    ----------
    dtype
        ``torch.bfloat16`` or ``torch.float16``.

    Raises
    ------
    ValueError
        ``dtype`` is neither.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_choice(self.dtype, "dtype", (torch.bfloat16, torch.float16))

    @property
    def limit(self) -> float:
        """The largest number of the dtype."""
        return torch.finfo(self.dtype).max

    def bits_per_number(self, head_dim: int) -> float:
        """Just 16."""
        return 16.0

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).float()
