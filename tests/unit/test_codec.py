import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import codec
from kvlab.quantizers import AsymmetricInteger

pytestmark = pytest.mark.unit


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def f16(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


def slow_encode(x: list[float]) -> bytes:
    """The definition in plain Python, whose doubles, rounded after each operation, are float32 arithmetic."""
    offset = f16(min(x) + 0.0)
    scale = f16(f32(max(0.0, f32(max(x) - offset)) / 15))
    # Python's round takes ties to even.
    codes = [min(max(round(f32(f32(v - offset) / scale)), 0), 15) if scale else 0 for v in x]
    half = len(x) // 2
    return bytes(codes[i] | codes[i + half] << 4 for i in range(half)) + struct.pack("<ee", scale, offset)


def slow_decode(data: bytes) -> list[float]:
    scale, offset = struct.unpack("<ee", data[-4:])
    codes = [byte & 15 for byte in data[:-4]] + [byte >> 4 for byte in data[:-4]]
    return [f32(offset + f32(scale * code)) for code in codes]


def dyadic(vectors: int, head_dim: int) -> torch.Tensor:
    """Exact in float32 without a random generator: multiples of 1/64, growing from vector to vector."""
    i = torch.arange(vectors)[:, None]
    j = torch.arange(head_dim)[None, :]
    return ((i * i * 131 + j * j * 71 + i * j * 29) % 2039 - 1019).float() * (i % 13 + 1) / 64


def to_bytes(encoded: torch.Tensor) -> bytes:
    return bytes(encoded.flatten().tolist())


def test_golden_vector_by_hand():
    # o = −1 (0xBC00), s = 15/15 = 1 (0x3C00), codes 0 5 15 8: ties 7.5 → 8 and, were it there, 8.5 → 8.
    x = torch.tensor([-1.0, 4.0, 14.0, 6.5])
    assert to_bytes(codec.encode(x)) == bytes([0 | 15 << 4, 5 | 8 << 4, 0x00, 0x3C, 0x00, 0xBC])
    assert codec.decode(codec.encode(x)).tolist() == [-1.0, 4.0, 14.0, 7.0]


def test_golden_hash():
    # The hash of what the slow twin gives.
    digest = hashlib.sha256(to_bytes(codec.encode(dyadic(5000, 128)))).hexdigest()
    assert digest == "03ba2cd6fd684057b45b0f9ae86df9f07329f02e9c99adf7867c7a9039d027e7"


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
def test_equals_its_slow_twin(head_dim):
    x = torch.cat([dyadic(40, head_dim), dyadic(40, head_dim) / 3, 1e-6 * dyadic(10, head_dim)])
    encoded = codec.encode(x)
    assert [bytes(row) for row in encoded.tolist()] == [slow_encode(row) for row in x.tolist()]
    assert codec.decode(encoded).tolist() == [slow_decode(bytes(row)) for row in encoded.tolist()]


dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
magnitudes = st.sampled_from([65_504.0, 65_472.0, 100.0, 1.0, 1e-3, 6e-8, 1e-30, 0.0])


@st.composite
def tensors(draw):
    shape = (*draw(st.lists(st.integers(1, 4), max_size=3)), 2 * draw(st.integers(1, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unit = draw(st.sampled_from([rng.uniform(-1, 1, shape), rng.uniform(0.999, 1, shape), np.ones(shape)]))
    dtype = draw(dtypes)
    # bfloat16 rounds 65,504 up to 65,536, which is refused.
    return (torch.from_numpy(unit) * draw(magnitudes)).clamp(-65_280, 65_280).to(dtype)


@settings(deadline=None, max_examples=200)
@given(tensors())
def test_bytes_and_quantizer_agree_bit_for_bit(x):
    encoded = codec.encode(x)
    assert encoded.shape == (*x.shape[:-1], x.shape[-1] // 2 + 4)
    assert encoded.dtype == torch.uint8
    decoded = codec.decode(encoded, x.dtype)
    stored = AsymmetricInteger(4).roundtrip(x)
    assert decoded.dtype == stored.dtype == x.dtype
    assert decoded.shape == stored.shape == x.shape
    assert torch.equal(decoded, stored)
    assert torch.equal(torch.signbit(decoded), torch.signbit(stored))


@settings(deadline=None)
@given(st.lists(st.floats(-65_504, 65_504, width=32), min_size=2, max_size=16).filter(lambda v: len(v) % 2 == 0))
def test_any_vector_equals_the_slow_twin(vector):
    assert to_bytes(codec.encode(torch.tensor(vector))) == slow_encode(vector)


def test_extremes_of_fp16():
    x = torch.tensor([-65_504.0, 65_504.0])
    assert to_bytes(codec.encode(x)) == slow_encode(x.tolist())
    # s = fp16(131008/15) = 8736, so the top returns as −65504 + 15·8736.
    assert codec.decode(codec.encode(x)).tolist() == [-65_504.0, 65_536.0]


def test_every_byte_pattern_of_finite_metadata_decodes():
    # All 16 bits of scale and offset, negative and subnormal ones among them.
    words = np.arange(2**16, dtype=np.uint16)
    words = words[np.isfinite(words.view(np.float16))]
    data = np.zeros((len(words), 5), dtype=np.uint8)
    data[:, 0] = 0x10
    data[:, 3], data[:, 4] = words & 0xFF, words >> 8
    decoded = codec.decode(torch.from_numpy(data)).numpy()
    assert np.array_equal(decoded[:, 0], words.view(np.float16).astype(np.float32))
    data[:, 1:3], data[:, 3:] = data[:, 3:].copy(), 0
    assert np.array_equal(codec.decode(torch.from_numpy(data)).numpy()[:, 1], decoded[:, 0])


def test_blocks_are_invisible():
    x = dyadic(5000, 16)
    assert torch.equal(codec.encode(x), torch.cat([codec.encode(x[:999]), codec.encode(x[999:])]))
    encoded = codec.encode(x)
    assert torch.equal(codec.decode(encoded), torch.cat([codec.decode(encoded[:999]), codec.decode(encoded[999:])]))


def test_strided_input_and_untouched_arguments():
    x = dyadic(256, 12)[::2, 2:]
    before = x.clone()
    encoded = codec.encode(x)
    assert torch.equal(encoded, codec.encode(before.contiguous()))
    padded = torch.zeros(128, 20, dtype=torch.uint8)
    padded[:, 3:12] = encoded
    assert torch.equal(codec.decode(padded[:, 3:12]), codec.decode(encoded))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 5), ValueError, "x has head_dim 5 (its last dimension); accepted: an even number"),
        (torch.zeros(0, 4), ValueError, "x has shape [0, 4]; accepted: at least one token"),
        (torch.tensor(1.0), ValueError, "x has shape []; accepted: at least 1 dimensions"),
        (
            torch.zeros(2, 4, dtype=torch.int32),
            TypeError,
            "x has dtype torch.int32; accepted: a floating dtype",
        ),
        ([0.0, 1.0], TypeError, "x is a list; accepted: a floating-point torch.Tensor"),
        (torch.tensor([0.0, float("nan")]), ValueError, "x has a non-finite component"),
        (torch.tensor([0.0, -float("inf")]), ValueError, "x has a non-finite component"),
        (torch.tensor([0.0, 65_505.0]), ValueError, "magnitude 65505; accepted: at most 65504"),
    ],
)
def test_encode_refuses(x, error, message):
    with pytest.raises(error) as caught:
        codec.encode(x)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "error", "message"),
    [
        (torch.zeros(3, 8), TypeError, "codes is a torch.float32; accepted: a torch.uint8 tensor"),
        (b"12345678", TypeError, "codes is a bytes; accepted: a torch.uint8 tensor"),
        (
            torch.zeros(3, 4, dtype=torch.uint8),
            ValueError,
            "codes has shape [3, 4]; accepted: [..., head_dim / 2 + 4]",
        ),
        (torch.zeros(0, 8, dtype=torch.uint8), ValueError, "codes has shape [0, 8]"),
        (torch.tensor(3, dtype=torch.uint8), ValueError, "codes has shape []"),
    ],
)
def test_decode_refuses(codes, error, message):
    with pytest.raises(error) as caught:
        codec.decode(codes)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, "float32"])
def test_decode_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match=r"dtype is .*; accepted: a floating dtype"):
        codec.decode(torch.zeros(2, 8, dtype=torch.uint8), dtype)


def test_float16_saturates_as_the_quantizer_does():
    # In float32 the top is 65,536 (see above), which fp16 would round to infinity.
    x = torch.tensor([-65_504.0, 65_504.0]).half()
    decoded = codec.decode(codec.encode(x), torch.float16)
    assert decoded.tolist() == [-65_504.0, 65_504.0]
    assert torch.equal(decoded, AsymmetricInteger(4).roundtrip(x))
