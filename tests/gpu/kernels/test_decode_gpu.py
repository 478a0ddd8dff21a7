"""Decode attention on Hopper: every shape, the ends of fp16's range, CUDA graphs, poisoned memory."""

import itertools

import pytest
import torch
from decode_cases import FP16_INF, FP16_NAN, DecodeCase, relative_error

from kvlab import codec
from kvlab.kernels import nvrtc
from kvlab.kernels.decode import DecodePlan
from kvlab.kernels.layout import region_view, unpack_regions
from kvlab.kernels.naive.decode import decode_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(nvrtc.why_unavailable("cuda") is not None, reason=str(nvrtc.why_unavailable("cuda"))),
]

# Probabilities and probabilities times scales are rounded to fp16, 2⁻¹¹ of their size or less, the two roundings
# independent; a row of the output is a mean of values whose spread is at most about twice its size in these cases.
OUTPUT_BOUND = 2**-9
# Scores are exact to float32's rounding of sums about 1,024 times as large as they are: 2⁻²⁴ · 2¹⁰ · a few.
LSE_BOUND = 2**-11

SHAPES = [
    DecodeCase((1, 31, 0, 33, 4097, 300), q_len, group, num_kv_heads, block_size=block_size)
    for (q_len, group, num_kv_heads), block_size in itertools.product(
        [
            *((1, 12, 2), (1, 12, 4), (1, 1, 4), (1, 16, 1), (2, 4, 3), (2, 12, 2)),
            *((3, 6, 1), (4, 12, 2), (5, 8, 2), (8, 12, 1), (8, 16, 1)),
        ],
        [32, 96],
    )
]
LONG = [
    DecodeCase((65536,)),
    DecodeCase((40000, 0, 64, 8191)),
    DecodeCase((5000, 0, 64), block_size=64, padding=4096),
    DecodeCase((262144,), group=4, num_kv_heads=1),
    DecodeCase(tuple(range(0, 900, 3)), num_kv_heads=1),
    DecodeCase((17,) * 1500, group=1, num_kv_heads=1),
]


def plan_for(case):
    """Make a plan whose workspace holds what no kernel may use."""
    plan = DecodePlan(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        max_batch=len(case.lengths) + 3,
        q_len=case.q_len,
        backend="cuda",
    )
    for tensor in vars(plan._kernels).values():
        if isinstance(tensor, torch.Tensor):
            # As float32 a NaN, as an index far outside.
            tensor.view(torch.int32).fill_(-1 if tensor.is_floating_point() else -(2**30))
    return plan


def run(plan, inputs, dtype=torch.float32, **options):
    out = torch.full(inputs.q.shape, torch.nan, dtype=dtype, device="cuda")
    lse = torch.full(out.shape[:2], torch.nan, device="cuda")
    plan.update(inputs.seq_lens)
    plan.attend(*inputs.arguments, out=out, lse=lse, **options)
    return out, lse


def check(case, inputs, out, lse, *, bound=OUTPUT_BOUND, lse_bound=LSE_BOUND, **options):
    expected, expected_lse = decode_attention(*inputs.arguments, scale=case.scale, q_len=case.q_len, **options)
    assert relative_error(out, expected) <= bound
    torch.testing.assert_close(lse.double(), expected_lse, rtol=lse_bound, atol=lse_bound)
    assert (out[lse == -torch.inf] == 0).all()


@pytest.mark.parametrize("poison", [FP16_NAN, FP16_INF], ids=["nan", "inf"])
@pytest.mark.parametrize("case", SHAPES + LONG, ids=lambda case: str(case)[:80])
def test_agrees_with_its_twin(case, poison):
    inputs = case.inputs("cuda", poison=poison)
    check(case, inputs, *run(plan_for(case), inputs))


def test_bfloat16_output_is_the_float_one_rounded():
    case = DecodeCase((5000, 0, 33), q_len=2)
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    (exact, _), (rounded, _) = run(plan, inputs), run(plan, inputs, torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16())


def test_value_means_are_added():
    case = DecodeCase((4097, 0, 20000), q_len=3)
    inputs = case.inputs("cuda")
    mean = torch.randn(case.num_kv_heads, case.head_dim, device="cuda")
    out, lse = run(plan_for(case), inputs, value_mean=mean)
    check(case, inputs, out, lse, value_mean=mean)
    assert (out[lse == -torch.inf] == 0).all()


@pytest.mark.parametrize("value_std", [1e-3, 300.0, 6000.0])
def test_value_scales_far_from_one(value_std):
    case = DecodeCase((3000, 90))
    inputs = case.inputs("cuda", value_std=value_std)
    check(case, inputs, *run(plan_for(case), inputs))


# Queries of 20 make scores of about 200: their float32 rounding (2⁻²⁴ · 2¹⁰ of them) then counts four times as much as
# the probabilities'. At 10⁶ one key takes all, and 10⁻⁴ makes all keys alike.
@pytest.mark.parametrize(("q_std", "bound"), [(1e-4, OUTPUT_BOUND), (20.0, 4 * OUTPUT_BOUND), (1e6, OUTPUT_BOUND)])
def test_queries_far_from_one(q_std, bound):
    case = DecodeCase((3000, 90))
    inputs = case.inputs("cuda", q_std=q_std)
    check(case, inputs, *run(plan_for(case), inputs), bound=bound)


def test_no_worse_than_twice_plain_bfloat16():
    case = DecodeCase((20000,))
    inputs = case.inputs("cuda")
    out, _ = run(plan_for(case), inputs)
    expected, _ = decode_attention(*inputs.arguments, scale=case.scale)
    blocks = inputs.block_table[0, : case.lengths[0] // case.block_size].long()
    keys, values = (codec.decode(x).bfloat16() for x in unpack_regions(region_view(inputs.cache)[blocks]))
    keys, values = (x.transpose(0, 1).flatten(1, 3)[:, None] for x in (keys, values))
    plain = torch.nn.functional.scaled_dot_product_attention(
        inputs.q.unflatten(1, (case.num_kv_heads, -1))[0, :, :, None], keys, values, scale=case.scale
    )
    assert relative_error(out, expected) <= 2 * relative_error(plain.reshape(out.shape), expected)


def test_a_long_run_of_one_warp_keeps_its_digits():
    # 64 sessions of 256k leave some 2,000 regions to a warp; here the two shares are as long. The mean of half a
    # million random values is small: what tensor cores truncate as they accumulate would show if it did not cancel.
    case = DecodeCase((524288,), num_kv_heads=1)
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    plan._kernels.shares = 2
    check(case, inputs, *run(plan, inputs))


def test_replayed_graph_follows_the_lengths():
    case = DecodeCase((5000, 33, 0, 700))
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    out, lse = run(plan, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(inputs.seq_lens)
        plan.attend(*inputs.arguments, out=out, lse=lse)
    for lengths in ((5000, 33, 0, 700), (1, 0, 0, 64), (4097, 32, 0, 65), (0, 0, 0, 0)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        if any(lengths):
            check(case, inputs, out, lse)
        else:
            assert (out == 0).all()


def test_nan_in_one_session_stays_there():
    case = DecodeCase((4097, 4097, 4097))
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    clean, _ = run(plan, inputs)
    inputs.q[1] = torch.nan
    inputs.cache[inputs.block_table[1, :129].long()] = 0xFF
    out, _ = run(plan, inputs)
    assert out[1].isnan().all()
    assert torch.equal(out[0::2], clean[0::2])


def test_repeats_bit_for_bit():
    case = DecodeCase((8191, 300), q_len=4)
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    (first, first_lse), (second, second_lse) = run(plan, inputs), run(plan, inputs)
    assert torch.equal(first, second)
    assert torch.equal(first_lse, second_lse)
