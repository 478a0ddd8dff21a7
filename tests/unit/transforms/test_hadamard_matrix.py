import pytest
import torch

from kvlab.transforms import hadamard_matrix
from kvlab.transforms.hadamard_matrix import factor_order

pytestmark = pytest.mark.unit

ORDERS = [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 40, 44, 48, 56, 60, 64, 68, 76, 80, 96, 104, 112, 128, 160, 192]
ORDERS += [240, 256, 320, 384, 512, 576]


@pytest.mark.parametrize("order", ORDERS)
def test_entries_are_signs_and_rows_orthogonal(order):
    H = hadamard_matrix(order)
    assert H.dtype == torch.float32
    assert H.shape == (order, order)
    assert H.abs().eq(1).all()
    # Sums of at most 576 signs are exact in float32.
    assert torch.equal(H @ H.T, order * torch.eye(order))


@pytest.mark.parametrize("order", [1, 2, 8, 64])
def test_power_of_two_is_sylvester(order):
    expected = [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    assert hadamard_matrix(order).tolist() == expected


@pytest.mark.parametrize(
    ("order", "factors"),
    [
        (12, (12, 1)),
        (24, (12, 2)),
        (28, (28, 1)),
        (36, (36, 1)),
        (80, (20, 4)),
        (96, (12, 8)),
        (192, (12, 16)),
        (104, (104, 1)),
        (128, (1, 128)),
    ],
)
def test_core_is_the_smallest(order, factors):
    assert factor_order(order) == factors


@pytest.mark.parametrize("order", [3, 6, 10, 50, 52, 92, 100])
def test_order_without_construction_is_refused(order):
    with pytest.raises(ValueError, match=rf"order is {order}.*accepted.*RandomizedHadamard\(block_size="):
        hadamard_matrix(order)


@pytest.mark.parametrize(("order", "error"), [(0, ValueError), (-4, ValueError), (4.0, TypeError), (True, TypeError)])
def test_no_order_at_all_is_refused(order, error):
    with pytest.raises(error, match=r"order is .*accepted: an integer of at least 1"):
        hadamard_matrix(order)


def test_result_is_the_callers_own():
    hadamard_matrix(12).zero_()
    assert hadamard_matrix(12).abs().eq(1).all()
