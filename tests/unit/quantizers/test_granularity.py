import pytest
import torch

from kvlab.quantizers import PerGroup, PerTensor, PerTokenHead

pytestmark = pytest.mark.unit


def test_overhead_is_spread_over_the_group():
    assert PerTokenHead().overhead(32, 128) == 0.25
    assert PerGroup(32).overhead(16, 128) == 0.5
    assert PerTensor().overhead(32, 128) == 0.0


@pytest.mark.parametrize("size", [1, 5, 32, 96])
def test_groups_are_views_of_neighbours(size):
    x = torch.arange(2 * 3 * 480.0).reshape(2, 3, 480)
    groups = PerGroup(size).split(x)
    assert groups.shape == (2, 3, 480 // size, size)
    assert groups.data_ptr() == x.data_ptr()
    assert torch.equal(groups.flatten(-2), x)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "32", None])
def test_group_size_is_checked(size):
    with pytest.raises(ValueError, match=r"size is .*; accepted: a positive integer that divides head_dim"):
        PerGroup(size)


@pytest.mark.parametrize("head_dim", [31, 80, 100])
def test_head_dim_must_be_a_multiple(head_dim):
    message = f"head_dim is {head_dim}; accepted: a multiple of the group size 32"
    with pytest.raises(ValueError, match=message):
        PerGroup(32).split(torch.zeros(2, head_dim))
    with pytest.raises(ValueError, match=message):
        PerGroup(32).overhead(16, head_dim)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_constant_scale_is_checked(value):
    with pytest.raises(ValueError, match=r"value is .*; accepted: a positive finite scale"):
        PerTensor(value)
