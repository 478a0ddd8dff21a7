import pytest
import torch
from decode_cases import FP16_INF, FP16_NAN, DecodeCase

from kvlab import codec
from kvlab.kernels.naive.decode import decode_attention

pytestmark = pytest.mark.unit

CASES = [
    DecodeCase((1, 31, 33)),
    DecodeCase((64, 0, 65), q_len=3, group=1, num_kv_heads=4, head_dim=64, block_size=96),
    DecodeCase((2, 40, 8, 0), q_len=8, group=6, num_kv_heads=1, head_dim=256, block_size=64),
]
# Both sides are float64 on at most 65 tokens and 256 dimensions: 2⁻⁵³ · 256, with room.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def plain_attention(case, inputs):
    """Softmax attention on the decoded tokens, which never saw a page."""
    out = torch.zeros(inputs.q.shape, dtype=torch.float64)
    lse = torch.full(inputs.q.shape[:2], -torch.inf, dtype=torch.float64)
    start = 0
    for sequence, length in enumerate(case.lengths):
        tokens = slice(start, start + length)
        start += length
        for place in range(case.q_len):
            visible = max(length - case.q_len + 1 + place, 0)
            for head in range(case.num_heads if visible else 0):
                row = sequence * case.q_len + place
                keys = codec.decode(inputs.keys[tokens][:visible, head // case.group]).double()
                values = codec.decode(inputs.values[tokens][:visible, head // case.group]).double()
                scores = case.scale * (keys @ inputs.q[row, head].double())
                out[row, head] = scores.softmax(0) @ values
                lse[row, head] = scores.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("poison", [FP16_NAN, FP16_INF], ids=["nan", "inf"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_softmax_attention_on_the_decoded_tokens(case, poison):
    inputs = case.inputs(poison=poison)
    out, lse = decode_attention(*inputs.arguments, scale=case.scale, q_len=case.q_len)
    expected_out, expected_lse = plain_attention(case, inputs)
    torch.testing.assert_close(out, expected_out, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)


def test_token_before_the_sequence_gives_zeros_and_minus_infinity():
    case = DecodeCase((0, 2), q_len=3)
    inputs = case.inputs()
    value_mean = torch.ones(case.num_kv_heads, case.head_dim)
    out, lse = decode_attention(*inputs.arguments, scale=case.scale, q_len=3, value_mean=value_mean)
    seen = torch.tensor([False] * 3 + [False, True, True])
    assert (out[~seen] == 0).all()
    assert (lse[~seen] == -torch.inf).all()
    assert lse[seen].isfinite().all()


def test_one_token_returns_its_value_and_the_mean():
    case = DecodeCase((1,), group=4)
    inputs = case.inputs()
    value_mean = torch.randn(case.num_kv_heads, case.head_dim)
    out, _ = decode_attention(*inputs.arguments, scale=case.scale, value_mean=value_mean)
    expected = codec.decode(inputs.values[0]).double() + value_mean.double()
    torch.testing.assert_close(out[0], expected.repeat_interleave(case.group, 0), **EXACT)


def test_arithmetic_and_results_take_the_dtype():
    case = DecodeCase((33,))
    inputs = case.inputs()
    exact, _ = decode_attention(*inputs.arguments, scale=case.scale)
    single, lse = decode_attention(*inputs.arguments, scale=case.scale, dtype=torch.float32)
    assert single.dtype == lse.dtype == torch.float32
    assert not torch.equal(single.double(), exact)
    # 2⁻²⁴ per operation, sums of 128 and 33 terms.
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-5)
