import numpy as np
import pytest
import torch

from kvlab.checks import check_choice, check_integer, check_list, check_number, check_scale

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3), torch.tensor([3])])
def test_integers_of_every_library(value):
    integer = check_integer(value, "n", minimum=0)
    assert type(integer) is int
    assert integer == 3


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), 1.0, np.float32(1), torch.tensor(1.0), "1", None, [1]]
)
def test_other_numbers_are_no_integers(value):
    with pytest.raises(TypeError, match=r"n is .*; accepted: an integer of at least 0"):
        check_integer(value, "n", minimum=0)


@pytest.mark.parametrize("value", [-1, 11, 10**400])
def test_integers_have_a_smallest_and_a_largest(value):
    assert [check_integer(value, "n", minimum=0, maximum=10) for value in (0, 10)] == [0, 10]
    with pytest.raises(ValueError, match=r"^n is -?1[01]*(\.\.\.0+)?; accepted: an integer from 0 to 10$"):
        check_integer(value, "n", minimum=0, maximum=10)


@pytest.mark.parametrize("value", [4.0, True, "4", torch.tensor([4, 5]), None])
def test_a_choice_has_the_type_of_what_is_accepted(value):
    with pytest.raises(ValueError, match=r"bits is .*; accepted: 2, 4"):
        check_choice(value, "bits", (2, 4))


@pytest.mark.parametrize(
    ("value", "error"), [("1", TypeError), (True, TypeError), (float("nan"), ValueError), (float("inf"), ValueError)]
)
def test_numbers_are_finite(value, error):
    with pytest.raises(error, match=r"scaling is .*; accepted: a finite number"):
        check_number(value, "scaling")


def test_scales_and_their_reciprocals_are_float32_numbers():
    smallest, largest = 2.0**-126, (2 - 2.0**-23) * 2.0**127
    assert check_scale(smallest, "s") == smallest
    assert check_scale(largest, "s") == largest
    for value in (smallest / 2, 2.0**128, 0.0, -1.0):
        with pytest.raises(ValueError, match=r"s is .*; accepted: a positive finite scale"):
            check_scale(value, "s")


def test_a_list_is_whatever_can_be_gone_through():
    assert check_list((n for n in (1, 2)), "n") == check_list((1, 2), "n") == [1, 2]


@pytest.mark.parametrize("values", [5, None, "12"])
def test_other_values_are_no_list(values):
    with pytest.raises(TypeError, match=r"n is .*; accepted: a list"):
        check_list(values, "n")
