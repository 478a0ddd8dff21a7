import pytest

from kvlab import tables
from kvlab.tables import published

pytestmark = pytest.mark.unit

FILES = sorted((tables.data_folder() / "published").glob("*.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_table_begins_with_its_source(path):
    assert path.read_text().startswith('# The write-up "Serving Kolibri-1 with a 4-bit KV cache" (2026): ')
    assert not published(path.stem).empty


def test_every_ruler_interval_contains_zero_and_its_difference():
    ruler = published("ruler")
    assert list(ruler["context"]) == [2**power for power in range(12, 19)]
    assert ((ruler["low"] < 0) & (ruler["high"] > 0)).all()
    assert ruler["difference"].between(ruler["low"], ruler["high"]).all()
    assert (ruler["difference"].min(), ruler["difference"].max()) == (-2.0, 1.0)


def test_ruler_differences_are_those_of_unrounded_scores():
    ruler = published("ruler")
    # Three roundings to one digit lie between: half a tenth each.
    apart = (ruler["hadamard-int4"] - ruler["fp8"] - ruler["difference"]).abs()
    assert (apart < 0.15 + 1e-9).all()
    assert (apart > 0.05).any(), "had they been computed from the rounded scores, all would agree"


def test_gpqa_counts_are_the_only_ones_that_round_to_the_percentages():
    for _, row in published("gpqa").iterrows():
        fitting = [count for count in range(199) if round(100 * count / 198, 1) == row["percent"]]
        assert fitting == [row["correct"]]


def test_gpqa_means_and_difference_follow_from_the_counts():
    (summary,) = published("gpqa_difference").to_dict("records")
    runs = published("gpqa")
    means = 100 * runs.groupby("scheme")["correct"].sum() / runs.groupby("scheme")["questions"].sum()
    assert runs.groupby("scheme").size().tolist() == [4, 4]
    for scheme in ("fp8", "hadamard-int4"):
        assert round(means[scheme], 1) == summary[scheme]
    assert round(means["hadamard-int4"] - means["fp8"], 1) == summary["difference"]
    assert summary["low"] < 0 < summary["high"]


def test_headlines_are_where_they_are_looked_for():
    headlines = published("headlines")
    gains = headlines[headlines["quantity"] == "sessions gain"].set_index("context")["value"]
    assert gains.to_dict() == {65536: 82, 262144: 95}
    assert headlines.set_index("quantity").loc["throughput gain", "value"] == 70
    assert headlines[["value", "unit", "wording"]].notna().all(axis=None)
