import hashlib
import math

import numpy as np
import pytest
import torch

from kvlab.transforms import Hadamard, RandomizedHadamard, hadamard_matrix, randomized_hadamard
from kvlab.transforms.hadamard import random_signs
from kvlab.transforms.hadamard_matrix import factor_order, hadamard_core

pytestmark = pytest.mark.unit

DIMS = [1, 2, 12, 28, 64, 80, 96, 128, 192, 256]
UNIT_ROUNDOFF = 2.0**-24


def vectors(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def rotate_in_numpy(x, signs, order):
    """The documented order of operations on one vector, in plain float32 loops."""
    core_order, power = factor_order(order)
    core = hadamard_matrix(core_order).tolist()
    factors = [np.float32(s) * np.float32(1 / math.sqrt(order)) for s in signs.tolist()]
    y = [np.float32(a) * b for a, b in zip(x.tolist(), factors, strict=True)]
    for start in range(0, len(y), order):
        block, mixed = y[start : start + order], []
        for signs_of_row in core:
            for k in range(power):
                total = np.float32(signs_of_row[0]) * block[k]
                for j in range(1, core_order):
                    total = total + np.float32(signs_of_row[j]) * block[j * power + k]
                mixed.append(total)
        stride = 1
        while stride < power:
            for i in range(order):
                if not i // stride % 2:
                    a, b = mixed[i], mixed[i + stride]
                    mixed[i], mixed[i + stride] = a + b, a - b
            stride *= 2
        y[start : start + order] = mixed
    return torch.tensor(np.array(y))


def test_golden_signs():
    signs = random_signs(128, 0, 0)
    digest = hashlib.sha256(b"kvlab/randomized-hadamard/1:0:0:0").digest()
    assert signs.tolist() == [1 - 2 * (digest[i // 8] >> i % 8 & 1) for i in range(128)]
    packed = np.packbits((signs < 0).numpy(), bitorder="little").tobytes()
    assert packed.hex() == "d158609928bc606aa0a0ba5758efe4e0"


def test_signs_go_on_past_one_digest():
    signs = random_signs(300, 5, 9)
    digest = hashlib.sha256(b"kvlab/randomized-hadamard/1:5:9:1").digest()
    assert torch.equal(signs[:256], random_signs(256, 5, 9))
    assert signs[256:].tolist() == [1 - 2 * (digest[i // 8] >> i % 8 & 1) for i in range(44)]


@pytest.mark.parametrize(
    ("dim", "seed", "layer", "digest"),
    [
        (128, 0, 0, "ffeedbb495ca1cc7add7735a61e19d57d6b413a7279bde31ba6382bdae81e75d"),
        (128, 7, 49, "cbc4cdd9b91604ba4291e10a51edc7e5c6e6a7ea663e146920cb1458538fe54f"),
        (96, 0, 4, "8767f1c612b42b2e30ad711216d4cbc33a6ed294a151ee1853855e3f125c72e9"),
        (512, 3, 9, "746e4a47be92a7b2f7cbcab5bc7ced24294b9f6a1c4fa3b4c054ea290315d940"),
    ],
)
def test_golden_matrices(dim, seed, layer, digest):
    R = randomized_hadamard(dim, seed, layer)
    assert hashlib.sha256(R.numpy().astype("<f4").tobytes()).hexdigest() == digest


def test_seeds_and_layers_differ():
    matrices = [randomized_hadamard(128, seed, layer) for seed in range(3) for layer in range(3)]
    assert len({matrix.numpy().tobytes() for matrix in matrices}) == 9


@pytest.mark.parametrize("dim", DIMS)
def test_forward_is_the_product_with_the_matrix(dim):
    x, R = vectors(3, 50, dim), randomized_hadamard(dim, 3, 4)
    y = RandomizedHadamard(seed=3).forward(x, layer=4)
    # Both sum dim numbers of total magnitude at most ‖x‖₁/√dim ≤ ‖x‖₂: at most 2·dim + 2 roundings.
    assert ((y - x @ R.T).abs() <= (2 * dim + 2) * UNIT_ROUNDOFF * x.norm(dim=-1, keepdim=True)).all()
    # On unit vectors every sum has one term, so nothing is rounded.
    assert torch.equal(RandomizedHadamard(seed=3).forward(torch.eye(dim), layer=4).T, R)


@pytest.mark.parametrize("dim", DIMS)
def test_forward_bits_are_those_of_the_documented_order(dim):
    x = vectors(2, dim, seed=dim)
    y = RandomizedHadamard(seed=1).forward(x, layer=2)
    expected = [rotate_in_numpy(row, random_signs(dim, 1, 2), dim) for row in x]
    assert torch.equal(y, torch.stack(expected))


def test_bits_do_not_depend_on_layout_or_neighbours():
    x, rotation = vectors(2, 1100, 80), RandomizedHadamard()
    y = rotation.forward(x)
    assert torch.equal(y[1, 7], rotation.forward(x[1, 7]))
    assert torch.equal(y, rotation.forward(x.movedim(-1, 0).contiguous().movedim(0, -1)))
    assert torch.equal(rotation.inverse(y), rotation.inverse(y.contiguous()))


@pytest.mark.parametrize("block_size", [None, 4, 20])
@pytest.mark.parametrize("shape", [(80,), (1, 80), (2, 3, 5, 80), (2100, 80)], ids=str)
def test_inverse_undoes_forward_and_writes_to_no_input(shape, block_size):
    x = vectors(*shape)
    for rotation in (Hadamard(block_size=block_size), RandomizedHadamard(2, block_size=block_size)):
        kept = x.clone()
        y = rotation.forward(x)
        assert y.shape == x.shape
        assert torch.equal(x, kept)
        kept = y.clone()
        back = rotation.inverse(y)
        assert torch.equal(y, kept)
        # Two sums of 80 numbers, of total magnitude at most ‖x‖₂ each, and the rounding of 1/√d twice.
        assert ((back - x).abs() <= (2 * 80 + 4) * UNIT_ROUNDOFF * x.norm(dim=-1, keepdim=True)).all()
        assert torch.equal(rotation.query(x), rotation.forward(x))


def test_blocks_are_hadamard_matrices_with_signs_per_channel():
    R = RandomizedHadamard(seed=6, block_size=20).forward(torch.eye(100)).T
    blocks = torch.block_diag(*[hadamard_matrix(20)] * 5) * random_signs(100, 6) * (1 / math.sqrt(20))
    assert torch.equal(R, blocks)


@pytest.mark.parametrize("dim", [64, 96])
def test_without_signs_it_is_the_hadamard_matrix(dim):
    expected = hadamard_matrix(dim) * (1 / math.sqrt(dim))
    assert torch.equal(Hadamard().forward(torch.eye(dim)).T, expected)


def test_seed_per_layer():
    x, rotation = vectors(4, 64), RandomizedHadamard(seed={4: 11, 9: 12})
    assert torch.equal(rotation.forward(x, layer=9), RandomizedHadamard(seed=12).forward(x, layer=9))
    with pytest.raises(ValueError, match="layer is 5, which seed lacks; accepted: 4, 9"):
        rotation.forward(x, layer=5)


@pytest.mark.parametrize("dim", [12, 64])
def test_keys_that_require_a_gradient_are_data(dim):
    x = vectors(5, dim).requires_grad_()
    rotated = RandomizedHadamard().forward(x)
    assert not rotated.requires_grad
    assert torch.equal(rotated, RandomizedHadamard().forward(x.detach()))


def test_any_float_dtype_is_computed_in_float32():
    x = vectors(6, 64).bfloat16()
    y = RandomizedHadamard().forward(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, RandomizedHadamard().forward(x.float()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RandomizedHadamard(seed=-1), ValueError, "seed is -1"),
        (lambda: RandomizedHadamard(seed=1.5), TypeError, "seed is 1.5"),
        (lambda: RandomizedHadamard(seed={}), ValueError, "seed is an empty mapping"),
        (lambda: RandomizedHadamard(seed={4: -2}), ValueError, r"seed\[4\] is -2"),
        (lambda: RandomizedHadamard(seed={-4: 2}), ValueError, "a layer of seed is -4"),
        (lambda: RandomizedHadamard(block_size=0), ValueError, "block_size is 0"),
        (lambda: Hadamard(block_size=6), ValueError, "block_size is 6"),
        (
            lambda: Hadamard(block_size=16).forward(torch.ones(2, 40)),
            ValueError,
            "head_dim 40.*block_size, 16",
        ),
        (lambda: Hadamard().forward(torch.ones(2, 100)), ValueError, "head_dim is 100.*block_size="),
        (lambda: Hadamard().forward(torch.ones(2, 64), layer=-1), ValueError, "layer is -1"),
        (lambda: RandomizedHadamard().inverse(torch.ones(2, 64), layer=1.0), TypeError, "layer is 1.0"),
        (
            lambda: Hadamard().forward(torch.ones(2, 64, dtype=torch.int32)),
            TypeError,
            "x has dtype torch.int32",
        ),
        (lambda: randomized_hadamard(128, "0"), TypeError, "seed is '0'"),
        (lambda: randomized_hadamard(128, 0, -5), ValueError, "layer is -5"),
        (lambda: randomized_hadamard(100, 0), ValueError, "order is 100"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dim", [28, 64, 96])
def test_defaults_of_the_caller_leave_no_trace(dim):
    expected = randomized_hadamard(dim, 0)
    hadamard_core.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            inside = randomized_hadamard(dim, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    for rotation in (inside, randomized_hadamard(dim, 0)):
        assert rotation.dtype == torch.float32
        assert torch.equal(rotation, expected)
