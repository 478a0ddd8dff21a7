"""Every quantizer against everything that all of them promise. A new quantizer is one entry in the list."""

import itertools
import math

import numpy as np
import pytest
import torch

from kvlab.quantizers import (
    MXFP4,
    NVFP4,
    AsymmetricInteger,
    Cast,
    Codebook,
    Float8,
    Float8ScaledInteger,
    IntegerZeroPoint,
    LloydMax,
    PerChannelInteger,
    PerGroup,
    PerTensor,
    PerTokenHead,
    Quantizer,
    RefitInteger,
    RefitUnequalInteger,
    SymmetricInteger,
    TurboQuant,
    UnequalInteger,
    nf4,
)
from kvlab.quantizers.base import map_blocks

pytestmark = pytest.mark.unit

HEAD_DIM = 64

# quantizer, bits per number at head_dim 128, whether its format promises that storing twice changes nothing.
ALL_QUANTIZERS = [
    (AsymmetricInteger(2), 2.25, False),
    (AsymmetricInteger(3), 3.25, False),
    (AsymmetricInteger(4), 4.25, False),
    (AsymmetricInteger(8), 8.25, False),
    (AsymmetricInteger(4, PerGroup(32)), 5.0, False),
    (AsymmetricInteger(4, PerGroup(64)), 4.5, False),
    # A scale that is an exact multiple's share of the largest level is found again.
    (SymmetricInteger(4, grid="restricted"), 4.125, True),
    (SymmetricInteger(4, grid="midrise"), 4.125, True),
    # The saturated positive extreme would set a smaller scale the second time.
    (SymmetricInteger(4, grid="full"), 4.125, False),
    (SymmetricInteger(2, PerGroup(32)), 2.5, True),
    (SymmetricInteger(8), 8.125, True),
    (IntegerZeroPoint(), 4.25, False),
    (PerChannelInteger(4), 5.0, False),
    (PerChannelInteger(2, group_tokens=64, residual=64), 2.5, False),
    (Float8(), 8.0, True),
    (Float8("e5m2"), 8.0, True),
    (Float8("e4m3", PerTokenHead()), 8.25, False),
    (NVFP4(), 4.5, True),
    (MXFP4(), 4.25, True),
    (nf4(), 4.25, True),
    (nf4(PerTokenHead()), 4.125, True),
    (Codebook((-1, 0, 1), PerGroup(16)), 3.0, True),
    (TurboQuant(2), 2.125, False),
    (TurboQuant(3), 3.125, False),
    (TurboQuant(4), 4.125, False),
    (RefitInteger(), 4.25, False),
    (RefitInteger((0.0, 0.025, 0.05), rounds=2), 4.25, False),
    (UnequalInteger(8), 4.25, False),
    (RefitUnequalInteger(8), 4.25, False),
    (Float8ScaledInteger(), 4.25, False),
    (Float8ScaledInteger(PerTokenHead(), global_scale=0.3), 4.125, False),
    (LloydMax(), 4.25, False),
    (LloydMax(2, PerGroup(16), reach=3, global_scale=0.3), 2.5, False),
    (Cast(torch.bfloat16), 16.0, True),
    (Cast(torch.float16), 16.0, True),
]
GROUPS = [Float8ScaledInteger(), LloydMax()]
every_quantizer = pytest.mark.parametrize("quantizer", [q for q, *_ in ALL_QUANTIZERS], ids=repr)

AWKWARD = {
    "zero": [0.0] * HEAD_DIM,
    "negative zero": [-0.0] * HEAD_DIM,
    "constant": [3.7] * HEAD_DIM,
    "negative constant": [-3.7] * HEAD_DIM,
    "one huge outlier": [6e4] + [0.01] * (HEAD_DIM - 1),
    "one huge negative outlier": [0.01] * (HEAD_DIM - 1) + [-6e4],
    "below fp16": [1e-9, -1e-9] * (HEAD_DIM // 2),
    "fp16 subnormal": [1e-7, -3e-7] * (HEAD_DIM // 2),
    "float32 subnormal": [1e-40, -2e-40] * (HEAD_DIM // 2),
}


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def relative_error(quantizer: Quantizer, x: torch.Tensor) -> float:
    return float((quantizer.roundtrip(x) - x).norm() / x.norm())


@pytest.mark.parametrize(("quantizer", "bits"), [entry[:2] for entry in ALL_QUANTIZERS], ids=repr)
def test_bits_per_number(quantizer, bits):
    assert quantizer.bits_per_number(128) == bits


@pytest.mark.parametrize("quantizer", [RefitInteger(), TurboQuant(), IntegerZeroPoint(), AsymmetricInteger(), MXFP4()])
@pytest.mark.parametrize("head_dim", [0, -128, 64.0, None])
def test_a_head_dim_that_is_none_has_no_bits(quantizer, head_dim):
    with pytest.raises((TypeError, ValueError), match=f"^head_dim is {head_dim}; accepted: an integer of at least 1$"):
        quantizer.bits_per_number(head_dim)


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_keeps_shape_and_dtype_and_leaves_its_input_alone(quantizer, dtype):
    x = gaussian(2, 3, 130, HEAD_DIM).to(dtype)
    before = x.clone()
    out = quantizer.roundtrip(x)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@every_quantizer
def test_16_bit_inputs_get_the_float32_arithmetic(quantizer):
    x = gaussian(140, HEAD_DIM).bfloat16()
    assert torch.equal(quantizer.roundtrip(x), quantizer.roundtrip(x.float()).bfloat16())


@every_quantizer
def test_storing_is_close(quantizer):
    # The coarsest entries, of two bits or three levels, err by half; a broken scale errs by a whole vector.
    assert relative_error(quantizer, gaussian(256, HEAD_DIM)) < 0.7


@pytest.mark.parametrize("quantizer", [q for q, _, promised in ALL_QUANTIZERS if promised], ids=repr)
@pytest.mark.parametrize("magnitude", [0.5, 1.0, 40.0])
def test_idempotent_where_promised(quantizer, magnitude):
    once = quantizer.roundtrip(magnitude * gaussian(256, HEAD_DIM))
    assert torch.equal(quantizer.roundtrip(once), once)


@every_quantizer
def test_a_token_depends_on_itself_alone_unless_it_says_otherwise(quantizer):
    x = gaussian(256, HEAD_DIM)
    whole = quantizer.roundtrip(x)
    order = torch.arange(256).flip(0)
    alone = torch.cat([quantizer.roundtrip(x[i : i + 1]) for i in range(0, 256, 37)])
    independent = torch.equal(quantizer.roundtrip(x[order])[order], whole) and torch.equal(alone, whole[::37])
    assert independent == quantizer.per_token


@every_quantizer
def test_blocks_are_invisible(quantizer):
    # 5000 tokens are two blocks of 4096; the pieces end elsewhere (at a multiple of KIVI's residual).
    x = gaussian(5000, HEAD_DIM)
    pieces = [quantizer.roundtrip(x[:1280]), quantizer.roundtrip(x[1280:])]
    assert torch.equal(quantizer.roundtrip(x), torch.cat(pieces))


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 3), ("meta", 1)])
def test_blocks_are_larger_off_the_cpu(device, blocks):
    seen = []
    # A device that computes nothing stands in for a GPU.
    map_blocks(lambda x: seen.append(x) or x, torch.empty(2, 6000, 2, device=device), per_token=True)
    assert len(seen) == blocks


@every_quantizer
def test_memory_layout_does_not_change_the_result(quantizer):
    x = gaussian(256, HEAD_DIM)
    strided = x.t().contiguous().t()
    assert torch.equal(quantizer.roundtrip(strided), quantizer.roundtrip(x))


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_awkward_vectors_stay_finite(quantizer, dtype):
    for name, vector in AWKWARD.items():
        x = torch.tensor(vector, dtype=dtype)
        for stored in (quantizer.roundtrip(x), quantizer.roundtrip(x.expand(128, -1))):
            assert stored.isfinite().all(), name
            # No format may enlarge the largest number by more than half a step; the coarsest step is 2/3.
            assert stored.abs().max() <= x.abs().max() * 4 / 3 + 1e-5, name


@every_quantizer
def test_zero_returns_as_zero(quantizer):
    assert not quantizer.roundtrip(torch.zeros(128, HEAD_DIM)).any()


@every_quantizer
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_refused(quantizer, bad):
    x = gaussian(4, HEAD_DIM)
    x[2, 5] = bad
    with pytest.raises(ValueError, match="x has a non-finite component"):
        quantizer.roundtrip(x)


@pytest.mark.parametrize(
    "quantizer", [AsymmetricInteger(), SymmetricInteger(), nf4(), TurboQuant(), RefitInteger()], ids=repr
)
def test_beyond_fp16_is_refused_where_metadata_is_fp16(quantizer):
    quantizer.roundtrip(torch.full((HEAD_DIM,), 65_504.0))
    with pytest.raises(ValueError, match=r"magnitude 65505; accepted: at most 65504"):
        quantizer.roundtrip(torch.full((HEAD_DIM,), 65_505.0))


@pytest.mark.parametrize("quantizer", [Float8(), Float8("e5m2"), NVFP4(), MXFP4(), Cast(), *GROUPS], ids=repr)
def test_beyond_fp16_is_stored_where_metadata_is_not_fp16(quantizer):
    assert quantizer.roundtrip(torch.full((HEAD_DIM,), 1e30)).isfinite().all()


@pytest.mark.parametrize(
    "family",
    [
        [AsymmetricInteger(bits) for bits in (2, 3, 4, 8)],
        [AsymmetricInteger(4), AsymmetricInteger(4, PerGroup(64)), AsymmetricInteger(4, PerGroup(32))],
        [SymmetricInteger(bits) for bits in (2, 3, 4, 8)],
        [PerChannelInteger(bits) for bits in (2, 3, 4, 8)],
        [TurboQuant(bits) for bits in (2, 3, 4)],
        [LloydMax(bits) for bits in (2, 3, 4)],
        # At equal bits: what the search and the smaller groups gain.
        [AsymmetricInteger(4), RefitInteger(), Float8ScaledInteger(), LloydMax()],
        [Float8("e5m2"), Float8("e4m3"), Cast(torch.bfloat16), Cast(torch.float16)],
    ],
    ids=lambda family: type(family[0]).__name__,
)
def test_more_bits_less_error(family):
    x = gaussian(1024, 128)
    errors = [relative_error(quantizer, x) for quantizer in family]
    # Every step here gains more than 5%, and sampling moves a figure by less than 1%.
    assert all(finer < 0.95 * coarser for coarser, finer in itertools.pairwise(errors))


@pytest.mark.parametrize(
    ("quantizer", "percent"),
    [
        (AsymmetricInteger(4), 9.98),
        (IntegerZeroPoint(), 10.06),
        (SymmetricInteger(4, grid="restricted"), 11.73),
        (SymmetricInteger(4, grid="midrise"), 10.95),
        (SymmetricInteger(4, grid="full"), 10.56),
    ],
    ids=repr,
)
def test_error_of_gaussian_vectors(quantizer, percent):
    # 10,000 vectors: over seeds the figure's standard deviation is 0.013 points (0.020 for symmetric).
    error = 100 * relative_error(quantizer, gaussian(10_000, 128))
    assert error == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AsymmetricInteger(5), "bits is 5; accepted: 2, 3, 4, 8"),
        (lambda: SymmetricInteger(1), "bits is 1; accepted: 2, 3, 4, 8"),
        (lambda: SymmetricInteger(4, grid="odd"), "grid is 'odd'; accepted: restricted, midrise, full"),
        (lambda: RefitInteger((0.04,)), "clips is (0.04,); accepted: 0 and then any shares from 0 to below 0.5"),
        (lambda: RefitInteger(()), "clips is (); accepted: 0 and then"),
        (lambda: RefitInteger((0, 0.5)), "clips is (0, 0.5); accepted: 0 and then"),
        (lambda: RefitInteger((0, math.nan)), "clips is (0, nan); accepted: 0 and then"),
        (lambda: RefitInteger(rounds=-1), "rounds is -1; accepted: an integer of at least 0"),
        (lambda: Float8ScaledInteger(clips=(0, -0.1)), "clips is (0, -0.1); accepted: 0 and then"),
        (lambda: Float8ScaledInteger(global_scale=0.0), "global_scale is 0.0; accepted: a positive finite scale"),
        (lambda: LloydMax(5), "bits is 5; accepted: 2, 3, 4"),
        (lambda: LloydMax(reach=-1), "reach is -1; accepted: an integer of at least 0"),
        (lambda: PerChannelInteger(6), "bits is 6; accepted: 2, 3, 4, 8"),
        (lambda: PerChannelInteger(group_tokens=0), "group_tokens is 0; accepted: an integer of at least 1"),
        (lambda: PerChannelInteger(residual=100), "residual is 100; accepted: a positive multiple of"),
        (lambda: TurboQuant(8), "bits is 8; accepted: 2, 3, 4"),
        (lambda: Float8("e3m4"), "kind is 'e3m4'; accepted: e4m3, e5m2"),
        (lambda: NVFP4(0.0), "global_scale is 0.0; accepted: a positive finite scale"),
        (lambda: Cast(torch.float32), "dtype is torch.float32; accepted: torch.bfloat16, torch.float16"),
        (
            lambda: NVFP4().roundtrip(torch.zeros(2, 24)),
            "head_dim is 24; accepted: a multiple of the group size 16",
        ),
        (
            lambda: MXFP4().roundtrip(torch.zeros(2, 48)),
            "head_dim is 48; accepted: a multiple of the group size 32",
        ),
        (lambda: MXFP4().bits_per_number(80), "head_dim is 80; accepted: a multiple of the group size 32"),
    ],
)
def test_wrong_values_are_named(build, message):
    with pytest.raises(ValueError) as caught:
        build()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda g: AsymmetricInteger(4, g),
        lambda g: SymmetricInteger(4, g),
        lambda g: Float8("e4m3", g),
        Float8ScaledInteger,
        lambda g: LloydMax(4, g),
        nf4,
    ],
)
def test_wrong_granularity_is_named(build):
    with pytest.raises(TypeError, match="granularity is 32; accepted: Per"):
        build(32)


def test_repr_is_how_it_was_built():
    assert repr(AsymmetricInteger(4, PerGroup(32))) == "AsymmetricInteger(bits=4, granularity=PerGroup(size=32))"
    assert repr(nf4()) == "Codebook(16 levels, PerGroup(size=64))"
    assert AsymmetricInteger(4) == AsymmetricInteger(4, PerTokenHead()) != AsymmetricInteger(3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AsymmetricInteger(4.0), ValueError, "bits is 4.0; accepted: 2, 3, 4, 8"),
        (lambda: PerTensor("a"), TypeError, "value is 'a'; accepted: a positive finite scale"),
        (lambda: PerTensor(1e-39), ValueError, "value is 1e-39; accepted: a positive finite scale"),
        (lambda: NVFP4("a"), TypeError, "global_scale is 'a'; accepted: a positive finite scale"),
        (lambda: NVFP4(1e39), ValueError, r"global_scale is 1e\+39; accepted: a positive finite scale"),
        (lambda: PerChannelInteger(4, "a"), TypeError, "group_tokens is 'a'; accepted: an integer of at least 1"),
        (lambda: PerChannelInteger(4, 32, 64.0), TypeError, "residual is 64.0; accepted: an integer of at least 1"),
        (lambda: RefitInteger(0.04), TypeError, "clips is 0.04; accepted: 0 and then any shares from 0 to below 0.5"),
        (lambda: RefitInteger("0"), TypeError, "clips is '0'; accepted: 0 and then any shares"),
        (lambda: RefitInteger(rounds=1.0), TypeError, "rounds is 1.0; accepted: an integer of at least 0"),
        (lambda: LloydMax(reach="1"), TypeError, "reach is '1'; accepted: an integer of at least 0"),
        (lambda: LloydMax(global_scale="a"), TypeError, "global_scale is 'a'; accepted: a positive finite scale"),
        (lambda: Codebook(["a"]), TypeError, r"levels are \['a'\]; accepted: a sequence of numbers"),
        (lambda: Codebook(3), TypeError, "levels are 3; accepted: a sequence of numbers"),
    ],
)
def test_wrong_types_and_unusable_scales_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
