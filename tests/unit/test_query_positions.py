import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.recording import query_positions

pytestmark = pytest.mark.unit


@given(context=st.integers(1, 5000), num_queries=st.integers(1, 600))
def test_positions_are_distinct_evenly_spaced_and_end_the_context(context, num_queries):
    positions = query_positions(context, num_queries)
    quarter = max(1, context // 4)
    assert positions.dtype == torch.int64
    assert len(positions) == min(num_queries, quarter)
    assert positions[0] >= context - quarter
    assert positions[-1] == context - 1
    steps = positions.diff()
    if len(steps):
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1


def test_known_positions():
    assert query_positions(16, 2).tolist() == [13, 15]
    assert query_positions(16, 99).tolist() == [12, 13, 14, 15]
    assert query_positions(1, 1).tolist() == [0]


@pytest.mark.parametrize("value", [0, -3, 2.5, True, None])
def test_bad_numbers_are_named(value):
    with pytest.raises((TypeError, ValueError), match=r"context is .*; accepted: an integer of at least 1"):
        query_positions(value, 1)
    with pytest.raises((TypeError, ValueError), match=r"num_queries is .*; accepted: an integer of at least 1"):
        query_positions(8, value)


def test_numbers_of_numpy_are_numbers():
    assert query_positions(np.int64(16), np.int32(2)).tolist() == [13, 15]
