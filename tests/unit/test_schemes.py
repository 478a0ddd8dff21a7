import pytest
import torch

import kvlab
from kvlab import Scheme, StoredAs, get_scheme, list_schemes, register_scheme
from kvlab.quantizers import AsymmetricInteger
from kvlab.transforms import Center, ChannelScale, RandomizedHadamard

pytestmark = pytest.mark.unit

# Bits per number of keys and values at head_dim 128, counted by hand.
BITS = {
    "bf16": (16, 16),
    "fp8": (8, 8),
    "fp8-e5m2": (8, 8),
    "fp8-per-token-head": (8.25, 8.25),
    "int8": (8.25, 8.25),
    "int4": (4.25, 4.25),
    "int3": (3.25, 3.25),
    "int2": (2.25, 2.25),
    "int4-symmetric": (4.125, 4.125),
    "int4-g64": (4.5, 4.5),
    "int4-g32": (5, 5),
    "hadamard-int4": (4.25, 4.25),
    "hadamard-int4-with-gain": (4.25, 4.25),
    "hadamard-int3": (3.25, 3.25),
    "hadamard-int2": (2.25, 2.25),
    "int4-per-token-head": (4.25, 4.25),
    "turboquant-4bit": (4.125, 4.25),
    "kivi-int4": (5, 5),
    "kivi-int2": (3, 3),
    "nvfp4": (4.5, 4.5),
    "mxfp4": (4.25, 4.25),
    "nf4": (4.25, 4.25),
    "hadamard-int4-refit": (4.25, 4.25),
    "hadamard-int4-refit-kv": (4.25, 4.25),
    "hadamard-int4-g64-fp8": (4.25, 4.25),
    "hadamard-int4-g64-fp8-kv": (4.25, 4.25),
    "hadamard-lloyd-g32": (4.25, 4.25),
    "hadamard-lloyd-g32-kv": (4.25, 4.25),
}


def keys(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_table_is_complete():
    assert list_schemes() == list(BITS)


@pytest.mark.parametrize("name", BITS)
def test_bits_per_number_count_the_metadata(name):
    scheme = get_scheme(name)
    assert (scheme.keys.bits_per_number(128), scheme.values.bits_per_number(128)) == BITS[name]
    assert scheme.bits_per_number(128) == sum(BITS[name]) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", BITS)
def test_roundtrip_keeps_shape_dtype_and_the_input(name, head_dim, dtype):
    x = keys(2, 3, 260, head_dim).to(dtype)
    before = x.clone()
    for side in (get_scheme(name).keys, get_scheme(name).values):
        stored = side.roundtrip(x, layer=4)
        assert stored.shape == x.shape and stored.dtype == dtype and stored.isfinite().all()
        # Gaussian vectors: even 2 bits keep more than half of the energy.
        assert (stored - x).double().norm() < 0.7 * x.double().norm()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["hadamard-int4", "hadamard-int3", "hadamard-int2"])
def test_layers_have_their_own_rotation(name):
    x = keys(10, 64)
    side = get_scheme(name).keys
    assert not torch.equal(side.roundtrip(x, layer=4), side.roundtrip(x, layer=9))


def test_the_write_up_folds_and_its_ablation_does_not():
    k, gain = keys(10, 64), torch.linspace(0.1, 3, 64)
    folded, plain = get_scheme("hadamard-int4"), get_scheme("hadamard-int4-with-gain")
    stored = folded.store_keys(gain * k, layer=4, normed_keys=k, k_gain=gain)
    assert torch.equal(stored, gain * folded.keys.roundtrip(k, layer=4))
    expected = plain.keys.roundtrip(gain * k, layer=4)
    assert torch.equal(plain.store_keys(gain * k, layer=4, normed_keys=k, k_gain=gain), expected)
    assert torch.equal(folded.store_keys(gain * k, layer=4), expected)


def test_two_lines_make_a_scheme(monkeypatch):
    monkeypatch.setattr(kvlab.schemes, "_REGISTRY", dict(kvlab.schemes._REGISTRY))
    mine = Scheme(
        "mine",
        keys=StoredAs(
            Center(torch.ones(64)),
            ChannelScale(torch.full((64,), 2.0)),
            RandomizedHadamard(seed=7),
            quantizer=AsymmetricInteger(4),
        ),
        values=StoredAs(quantizer=AsymmetricInteger(4)),
    )
    assert register_scheme(mine) is get_scheme("mine")
    assert get_scheme(mine) is mine
    assert mine.keys.bits_per_number(64) == 4.5
    x = 1 + keys(50, 64) / 100
    # Centred, the grid spans what differs between keys: far finer than the mean of 1 it left out.
    assert (mine.keys.roundtrip(x) - x).norm() < 0.2 * (x - 1).norm()
    with pytest.raises(ValueError, match="scheme name 'mine' is taken"):
        register_scheme(mine)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: get_scheme("hadamrd-int4"), ValueError, "did you mean 'hadamard-int4'"),
        (lambda: get_scheme(4), TypeError, "scheme is a int; accepted: a name or a kvlab.Scheme"),
        (lambda: register_scheme("int4"), TypeError, "scheme is a str; accepted: a kvlab.Scheme"),
        (lambda: StoredAs(quantizer="int4"), TypeError, "quantizer is a str; accepted: a kvlab quantizer"),
        (lambda: StoredAs("hadamard", quantizer=AsymmetricInteger(4)), TypeError, "transforms has a str"),
        (lambda: get_scheme("hadamard-int4").keys.roundtrip(torch.zeros(3, 100)), ValueError, "100"),
        (lambda: get_scheme("nvfp4").keys.roundtrip(torch.zeros(3, 24)), ValueError, "24"),
        (lambda: get_scheme("int4").keys.roundtrip(torch.zeros(3, 0)), ValueError, r"x has shape \[3, 0\]"),
        (lambda: get_scheme("int4").keys.roundtrip(torch.zeros(0, 64)), ValueError, r"x has shape \[0, 64\]"),
        (lambda: get_scheme("int4").keys.roundtrip(torch.zeros(2, 8).int()), TypeError, "torch.int32"),
        (lambda: get_scheme("int4").keys.roundtrip(torch.full((2, 8), float("nan"))), ValueError, "non-finite"),
        (lambda: get_scheme("int4").keys.roundtrip(torch.full((2, 8), 7e4)), ValueError, "at most 65504"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", BITS)
def test_one_token_and_one_vector(name):
    x = keys(1, 64)
    for side in (get_scheme(name).keys, get_scheme(name).values):
        assert torch.equal(side.roundtrip(x)[0], side.roundtrip(x[0]))


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("head_dim", [0, -64])
def test_bits_need_a_head_dim(name, head_dim):
    for side in (get_scheme(name).keys, get_scheme(name).values):
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}; accepted: an integer of at least 1"):
            side.bits_per_number(head_dim)


def test_bits_need_a_head_dim_that_the_transforms_hold():
    with pytest.raises(ValueError, match="head_dim is 7, for which no Hadamard matrix"):
        get_scheme("hadamard-int4").bits_per_number(7)
    int4 = AsymmetricInteger(4)
    with pytest.raises(ValueError, match="head_dim 20; accepted: a multiple of block_size, 16"):
        StoredAs(RandomizedHadamard(block_size=16), quantizer=int4).bits_per_number(20)
    for transform in (Center(torch.ones(16)), ChannelScale(torch.ones(2, 16))):
        with pytest.raises(ValueError, match=r"head_dim is 8; accepted: that of \w+, 16"):
            StoredAs(transform, quantizer=int4).bits_per_number(8)
        assert StoredAs(transform, quantizer=int4).bits_per_number(16) == 6


def test_an_error_after_a_transform_says_so():
    full = torch.full((2, 64), 65_504.0)
    with pytest.raises(ValueError, match=r"^x, transformed, has a component of magnitude"):
        get_scheme("hadamard-int4").keys.roundtrip(full)
    with pytest.raises(ValueError, match=r"^x has a component of magnitude"):
        get_scheme("int4").keys.roundtrip(2 * full)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": 1}, TypeError, "keys is a int; accepted: a kvlab.StoredAs"),
        ({"values": AsymmetricInteger(4)}, TypeError, "values is a AsymmetricInteger; accepted: a kvlab.StoredAs"),
        ({"name": 3}, TypeError, "name is a int; accepted: a non-empty string"),
        ({"name": ""}, ValueError, "name is empty"),
    ],
)
def test_a_scheme_has_a_name_and_two_sides(arguments, error, message):
    side = StoredAs(quantizer=AsymmetricInteger(4))
    with pytest.raises(error, match=message):
        Scheme(**{"name": "mine", "keys": side, "values": side, **arguments})
