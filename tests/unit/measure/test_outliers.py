import math

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.measure import layers_lowered_by_folding, outlier_ratio
from kvlab.measure import outliers as module

pytestmark = pytest.mark.unit


def keys(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_one_large_channel_gives_its_ratio():
    x = torch.ones(2, 5, 8)
    x[1, :, 3] = -9.0
    # The second head's channels: seven of 1 and one of 9, so 9 over an average of 2.
    assert outlier_ratio(x) == pytest.approx(4.5, rel=1e-12)
    # Pooled, that channel has (1 + 9)/2 = 5 over an average of (7 + 5)/8 = 1.5.
    assert outlier_ratio(x, pool_heads=True) == pytest.approx(5 / 1.5, rel=1e-12)


def test_rms_weighs_large_tokens_more():
    x = torch.ones(1, 4, 4)
    x[0, 0, 0] = 5.0
    # Mean magnitudes 2, 1, 1, 1; root mean squares √7, 1, 1, 1.
    assert outlier_ratio(x) == pytest.approx(2 / 1.25)
    assert outlier_ratio(x, statistic="rms") == pytest.approx(7**0.5 / ((7**0.5 + 3) / 4))


def test_a_single_head_needs_no_head_dimension():
    x = keys(20, 16)
    assert outlier_ratio(x) == outlier_ratio(x[None])


def test_batches_are_averaged_like_tokens():
    x = keys(3, 2, 10, 16)
    together = x.transpose(0, 1).reshape(2, 30, 16)
    # Sums in float64 over float32 magnitudes: only their order differs.
    assert outlier_ratio(x) == pytest.approx(outlier_ratio(together), rel=1e-12)


def test_blocks_are_invisible(monkeypatch):
    x = keys(2, 100, 16)
    whole = outlier_ratio(x)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 7)
    # Within a block float32 magnitudes are summed in float64, so the blocks' borders cost no digits.
    assert outlier_ratio(x) == pytest.approx(whole, rel=1e-12)


@given(st.integers(0, 100), st.sampled_from([2, 8, 64]), st.integers(-10, 10))
def test_between_one_and_head_dim_and_blind_to_scale(seed, head_dim, exponent):
    x = keys(2, 3, head_dim, seed=seed)
    ratio = outlier_ratio(x)
    assert 1 <= ratio <= head_dim
    assert outlier_ratio(x * 2.0**exponent) == ratio


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), TypeError, "x has dtype torch.int32"),
        (torch.zeros(2, 0, 8), ValueError, r"x has shape \[2, 0, 8\]"),
        (torch.zeros(8), ValueError, r"x has shape \[8\]"),
        (torch.full((1, 2, 4), float("inf")), ValueError, "non-finite"),
        (torch.full((1, 2, 4), float("nan")), ValueError, "non-finite"),
        ([1.0], TypeError, "x is a list"),
    ],
)
def test_bad_input_is_named(x, error, message):
    with pytest.raises(error, match=message):
        outlier_ratio(x)


def test_unknown_statistic_is_named():
    with pytest.raises(ValueError, match="statistic is 'max'; accepted: mean, rms"):
        outlier_ratio(keys(2, 4), statistic="max")


def test_layers_lowered_counts_layers():
    rows = [(4, "raw", 3.0), (4, "without gain", 2.0), (9, "raw", 3.0), (9, "without gain", 3.5)]
    table = pd.DataFrame(rows, columns=["layer", "form", "ratio"])
    assert layers_lowered_by_folding(table) == (1, 2)
    assert layers_lowered_by_folding(table[table["form"] == "raw"]) == (0, 0)


def test_root_mean_squares_neither_underflow_nor_overflow():
    x = keys(2, 10, 8)
    expected = outlier_ratio(x, statistic="rms")
    for exponent in (-110, 110):
        # Powers of two scale exactly; squares of 2^±110 lie far outside of float32.
        assert outlier_ratio(x * 2.0**exponent, statistic="rms") == pytest.approx(expected, rel=1e-12)
    assert outlier_ratio(x.double() * 2.0**200) == pytest.approx(outlier_ratio(x), rel=1e-12)


def test_zero_heads_do_not_count():
    x = keys(2, 10, 8)
    alone = outlier_ratio(x[1])
    x[0] = 0
    assert outlier_ratio(x) == alone
    assert math.isnan(outlier_ratio(torch.zeros(2, 10, 8)))
