"""What the server folds into its kernels is the scheme that the library measures."""

from types import SimpleNamespace

import pytest
import torch

import kvlab
from kvlab.calibrate import calibrated_scheme
from kvlab.kernels.naive.norm_rotate_store import normalise, rotate
from kvlab.serving import schemes
from kvlab.serving.options import Options
from kvlab.serving.schemes import layer_folding, served_scheme, value_map

pytestmark = pytest.mark.unit

LAYER, HEAD_DIM, TOTAL_KV_HEADS, GROUP, TOKENS = 9, 128, 4, 3, 11


@pytest.fixture
def gains():
    return (torch.rand(2, HEAD_DIM, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()


def test_seed_and_default_are_the_librarys():
    library = kvlab.get_scheme("hadamard-int4")
    x = torch.randn(5, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    assert torch.equal(served_scheme(Options("hadamard-int4")).keys.roundtrip(x, 4), library.keys.roundtrip(x, 4))
    seeded = served_scheme(Options("hadamard-int4", rotation_seed=7))
    # The same sums of 128 float32 numbers of order 0.1, in another order.
    expected = x @ kvlab.randomized_hadamard(HEAD_DIM, 7, layer=4).T
    torch.testing.assert_close(seeded.keys.transform.forward(x, 4), expected, rtol=0, atol=1e-5)
    assert served_scheme(Options("int4")) is kvlab.get_scheme("int4")


@pytest.mark.parametrize("name", ["hadamard-int4", "hadamard-int4-refit", "hadamard-int4-refit-kv", "int4"])
def test_quantizers_are_the_schemes(gains, name):
    scheme = served_scheme(Options(name))
    folding = layer_folding(scheme, LAYER, *gains, [0, 1])
    assert (folding.k_quantizer, folding.v_quantizer) == (scheme.keys.quantizer, scheme.values.quantizer)


def test_a_calibration_of_what_no_kernel_writes_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "calibration.safetensors"
    file.touch()
    made = SimpleNamespace(scheme=lambda: calibrated_scheme("hadamard-int3", 5))
    monkeypatch.setattr(schemes.Calibration, "load", lambda path: made)
    with pytest.raises(ValueError, match=r"calibration.safetensors: the quantizer of keys is .*bits=3.*; accepted: "):
        served_scheme(Options("calibrated", calibration=str(file)))


@pytest.mark.parametrize("name", ["hadamard-int4", "int4", "calibrated"])
@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [2, 3], [1]], ids=str)
def test_matrices_are_transform_and_gains_of_the_ranks_heads(gains, name, heads):
    generator = torch.Generator().manual_seed(2)
    means = {LAYER: torch.randn(TOTAL_KV_HEADS, HEAD_DIM, generator=generator)}
    scheme = calibrated_scheme("hadamard-int4", 5, means) if name == "calibrated" else kvlab.get_scheme(name)
    q_gain, k_gain = gains
    folding = layer_folding(scheme, LAYER, q_gain, k_gain, heads)
    width = (GROUP + 2) * len(heads) * HEAD_DIM
    qkv = torch.randn(TOKENS, width, generator=generator)
    shape = {"num_heads": GROUP * len(heads), "num_kv_heads": len(heads)}
    q, keys, values = rotate(qkv, folding, **shape)

    raw_q, raw_k, raw_v = (
        qkv.double().unflatten(1, (-1, HEAD_DIM)).split([shape["num_heads"], len(heads), len(heads)], dim=1)
    )
    k = normalise(raw_k, 1e-6).float() * (1 if scheme.fold_gain else k_gain.float())
    gain = q_gain.float() * (k_gain.float() if scheme.fold_gain else 1)
    # The library's transforms know all heads of the layer: the rank's are some of them.
    every = torch.zeros(TOTAL_KV_HEADS, TOKENS, HEAD_DIM)
    every[heads] = k.transpose(0, 1)
    expected_keys = scheme.keys.transform.forward(every, LAYER)[heads].transpose(0, 1)
    rotated = scheme.keys.transform.query((normalise(raw_q, 1e-6).float() * gain).transpose(0, 1), LAYER)
    # float32 in the library, float64 here: sums of 128 products of order 1.
    torch.testing.assert_close(keys.float(), expected_keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(q.float(), rotated.transpose(0, 1), rtol=0, atol=1e-5)
    assert torch.equal(values, raw_v)
    assert (folding.k_bias is None) == (name != "calibrated")


@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [2, 3], [1]], ids=str)
def test_values_meet_the_schemes_map_and_outputs_come_back(gains, heads):
    generator = torch.Generator().manual_seed(3)
    means = {LAYER: torch.randn(TOTAL_KV_HEADS, HEAD_DIM, generator=generator)}
    basis = torch.linalg.qr(torch.randn(TOTAL_KV_HEADS, HEAD_DIM, HEAD_DIM, generator=generator)).Q
    # No direction is made three times another.
    maps = {LAYER: basis * (0.6 + torch.rand(TOTAL_KV_HEADS, 1, HEAD_DIM, generator=generator))}
    scheme = calibrated_scheme("hadamard-int4", 5, value_means=means, value_maps=maps)
    sizes = {"num_kv_heads": TOTAL_KV_HEADS, "head_dim": HEAD_DIM, "device": torch.device("cpu")}
    values = value_map(scheme, LAYER, heads, **sizes)
    folding = layer_folding(scheme, LAYER, *gains, heads, values)
    every = torch.randn(TOTAL_KV_HEADS, TOKENS, HEAD_DIM, generator=generator)
    expected = scheme.values.transform.forward(every, LAYER)[heads]
    stored = every[heads] @ folding.v_matrix.mT + folding.v_bias[:, None]
    # Sums of 128 products of numbers below 4, in float32.
    torch.testing.assert_close(stored, expected, rtol=0, atol=128 * 4 * 2**-24)

    # Each query head of a group has its KV head's outputs, here the stored values themselves.
    output = expected.repeat_interleave(GROUP, dim=0).transpose(0, 1).bfloat16().contiguous()
    values.restore(output)
    back = every[heads].repeat_interleave(GROUP, dim=0).transpose(0, 1)
    # Output and inverse were rounded to BF16, 0.4 · 2⁻⁸ in the mean square, and once more in the end: three roundings
    # of numbers up to 1.5 times as large, which is 1.1 · 2⁻⁸.
    assert (output.float() - back).norm() <= 2 * 2**-8 * back.norm()
    assert value_map(kvlab.get_scheme("hadamard-int4"), LAYER, heads, **sizes) is None
