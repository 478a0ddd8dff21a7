"""Channels of keys: their magnitudes by hand, and what they have to do with the outlier ratio."""

import pytest
import torch

from kvlab.measure import channel_table, outlier_table
from kvlab.recording import Capture, LayerCapture

pytestmark = pytest.mark.unit

HEAD_DIM, TOKENS = 8, 30


def capture_of(normed, gain=None):
    """A capture of one layer, 4, with these keys ``[batch, heads, tokens, head_dim]`` before this gain."""
    layer = LayerCapture(
        index=4,
        kind="full",
        rope=gain is None,
        scaling=1.0,
        q=normed,
        positions=torch.arange(normed.shape[2]),
        k=normed if gain is None else normed * gain,
        v=normed,
        normed_keys=None if gain is None else normed,
        k_gain=gain,
    )
    return Capture("tiny", "kolibri1", lambda: {4: layer})


def keys(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_magnitudes_and_means_by_hand():
    # Channel 0 is always 3, channel 1 is 1 or −1: of the average magnitude 2, 1.5 and 0.5; of the norm √10, 3 and 0.
    normed = torch.tensor([[3.0, 1.0], [3.0, -1.0]])[None, None]
    table = channel_table(capture_of(normed))
    assert table["magnitude"].tolist() == pytest.approx([1.5, 0.5], rel=1e-6)
    assert table["mean"].tolist() == pytest.approx([3 / 10**0.5, 0], rel=1e-6)


def test_the_largest_channel_is_the_outlier_ratio_of_each_form():
    captured = capture_of(keys(2, 3, TOKENS, HEAD_DIM), torch.linspace(0.5, 2, HEAD_DIM))
    table = channel_table(captured)
    assert table.groupby(["layer", "form", "head"])["magnitude"].mean().tolist() == pytest.approx([1] * 6, rel=1e-12)
    ratios = outlier_table(captured).set_index("form")["ratio"]
    for form in ("raw", "without gain"):
        # Both add up float32 magnitudes in float64.
        assert table.loc[table["form"] == form, "magnitude"].max() == pytest.approx(ratios[form], rel=1e-12)


def test_without_qk_norm_there_is_one_form():
    table = channel_table(capture_of(keys(1, 2, TOKENS, HEAD_DIM)))
    assert set(table["form"]) == {"raw"}
    assert len(table) == 2 * HEAD_DIM
