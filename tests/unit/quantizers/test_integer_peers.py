"""Formats of other systems against their definition, written out once more in plain Python."""

import math
import struct

import pytest
import torch

from kvlab.quantizers import AsymmetricInteger, IntegerZeroPoint, PerChannelInteger, SymmetricInteger

pytestmark = pytest.mark.unit


def wavy(*shape: int) -> torch.Tensor:
    return (torch.arange(math.prod(shape), dtype=torch.float64) * 0.7).sin().float().reshape(shape) * 3 + 0.25


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def slow_zero_point(x: list[float]) -> list[float]:
    scale = max(f32(f32(max(x) - min(x)) / 15), f32(1e-6))
    zero = min(max(math.floor(f32(f32(-min(x) / scale) + 0.5)), 0), 15)
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    stored = struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFF0 | zero))[0]
    packed = struct.unpack("<I", struct.pack("<f", stored))[0]
    zero_read, scale_read = packed & 0xF, struct.unpack("<f", struct.pack("<I", packed & 0xFFFFFFF0))[0]
    inverse = f32(1 / scale)
    codes = [min(max(math.floor(f32(f32(f32(v * inverse) + zero) + 0.5)), 0), 15) for v in x]
    return [f32(scale_read * (code - zero_read)) for code in codes]


@pytest.mark.parametrize("shift", [0.0, 2.9, -2.9, 50.0])
def test_zero_point_equals_its_slow_twin(shift):
    x = wavy(16, 32) + shift
    expected = torch.tensor([slow_zero_point(row) for row in x.tolist()])
    assert torch.equal(IntegerZeroPoint().roundtrip(x), expected)


def test_zero_point_loses_vectors_far_from_zero():
    # The zero-point ends at 0, so codes reach 15 steps up from zero: that is max − min, not max.
    stored = IntegerZeroPoint().roundtrip(wavy(4, 32) + 50)
    assert stored.max() < 7
    assert AsymmetricInteger(4).roundtrip(wavy(4, 32) + 50).min() > 46


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        # h = 2: multiples of 3; ±1.5 tie to the even multiple 0.
        ("restricted", [3.0, -3.0, 0.0, 0.0, 3.0, 0.0]),
        # Half-integers of 3/1.5 = 2, so −3, −1, 1, 3; zero lies half way, and the even code 0 means 1.
        ("midrise", [3.0, -3.0, 1.0, -1.0, 1.0, 1.0]),
        # Multiples of 1.5 from −3 to 1.5: the positive extreme saturates.
        ("full", [1.5, -3.0, 1.5, -1.5, 1.5, 0.0]),
    ],
)
def test_symmetric_grids_by_hand(grid, expected):
    x = torch.tensor([3.0, -3.0, 1.5, -1.5, 1.6, 0.0])
    stored = SymmetricInteger(2, grid=grid).roundtrip(x)
    assert stored.tolist() == expected


def test_per_channel_keeps_the_remainder_exact():
    x = wavy(2, 300, 8)
    stored = PerChannelInteger(2, group_tokens=32, residual=128).roundtrip(x)
    assert torch.equal(stored[:, 256:], x[:, 256:])
    assert not torch.equal(stored[:, 128:256], x[:, 128:256])
    assert torch.equal(PerChannelInteger(2).roundtrip(x[:, :127]), x[:, :127])


def test_per_channel_is_the_integer_quantizer_along_tokens():
    x = wavy(2, 128, 8)
    blocks = [AsymmetricInteger(3).roundtrip(b.transpose(-1, -2)).transpose(-1, -2) for b in x.split(32, dim=1)]
    assert torch.equal(PerChannelInteger(3).roundtrip(x), torch.cat(blocks, dim=1))


def test_per_channel_does_not_mind_outlier_channels():
    x = wavy(128, 16)
    alone = PerChannelInteger(4).roundtrip(x)
    x[:, 3] *= 1000
    others = [c for c in range(16) if c != 3]
    assert torch.equal(PerChannelInteger(4).roundtrip(x)[:, others], alone[:, others])
