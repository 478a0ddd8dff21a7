"""Quantizers: numbers to a few bits and back, simulated in float. One class per file.

Each has ``roundtrip(x)`` for float ``[..., tokens, head_dim]`` and ``bits_per_number(head_dim)``. Which
numbers share a scale is a type: `PerTokenHead`, `PerGroup`, `PerTensor`.
"""

from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.cast import Cast
from kvlab.quantizers.codebook import Codebook, lloyd_max_levels, nf4
from kvlab.quantizers.float8_scaled import Float8ScaledInteger
from kvlab.quantizers.fp8 import Float8
from kvlab.quantizers.granularity import Granularity, PerGroup, PerTensor, PerTokenHead
from kvlab.quantizers.integer import AsymmetricInteger
from kvlab.quantizers.lloyd_max import LloydMax
from kvlab.quantizers.mxfp4 import MXFP4
from kvlab.quantizers.nvfp4 import NVFP4
from kvlab.quantizers.per_channel import PerChannelInteger
from kvlab.quantizers.refit import RefitInteger
from kvlab.quantizers.symmetric import SymmetricInteger
from kvlab.quantizers.turboquant import TurboQuant
from kvlab.quantizers.unequal import RefitUnequalInteger, UnequalInteger
from kvlab.quantizers.zero_point import IntegerZeroPoint

__all__ = [
    "MXFP4",
    "NVFP4",
    "AsymmetricInteger",
    "Cast",
    "Codebook",
    "Float8",
    "Float8ScaledInteger",
    "Granularity",
    "IntegerZeroPoint",
    "LloydMax",
    "PerChannelInteger",
    "PerGroup",
    "PerTensor",
    "PerTokenHead",
    "Quantizer",
    "RefitInteger",
    "RefitUnequalInteger",
    "SymmetricInteger",
    "TurboQuant",
    "UnequalInteger",
    "lloyd_max_levels",
    "nf4",
]
