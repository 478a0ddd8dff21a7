import dataclasses

import pytest
import torch

from kvlab.calibrate import Calibration, balanced, calibrate, calibrating, fitted_scheme, key_means, search_seeds
from kvlab.calibrate.closed_forms import FINDERS
from kvlab.calibrate.fit import fit_layer, rotation_matrix
from kvlab.measure import layer_errors
from kvlab.quantizers import AsymmetricInteger, RefitUnequalInteger, UnequalInteger
from kvlab.recording import Capture
from kvlab.schemes import Scheme, StoredAs, get_scheme
from kvlab.transforms import Center, Chain, Matrix, RandomizedHadamard

pytestmark = pytest.mark.unit


def by_hand(seed, means, name):
    keys = StoredAs(Center(means), RandomizedHadamard(seed), quantizer=AsymmetricInteger(4))
    return Scheme(name, keys, StoredAs(quantizer=AsymmetricInteger(4)), fold_gain=True)


@pytest.fixture(scope="module")
def captures(capture_of):
    return [capture_of(seed=0, offset=2.0), capture_of(seed=1, offset=2.0)]


@pytest.fixture(scope="module")
def holdout(capture_of):
    return capture_of(seed=2, offset=2.0)


def test_the_best_seed_is_brute_force(captures, holdout):
    found = calibrate(captures, holdout, seeds=6, finalists=6)
    means = key_means(captures)
    for index in (4, 9):
        schemes = [by_hand(seed, means, str(seed)) for seed in range(6)]
        errors = layer_errors(holdout.layers[index], schemes, ["K"])
        best = min(range(6), key=lambda seed: errors[str(seed), "K"])
        assert found.seeds[index] == best
        entry = found.manifest["layers"][str(index)]
        # The manifest keeps six digits.
        assert entry["error_after"] == pytest.approx(errors[str(best), "K"], rel=1e-5)
        before = layer_errors(holdout.layers[index], ["hadamard-int4"], ["K"])["hadamard-int4", "K"]
        assert entry["error_before"] == pytest.approx(before, rel=1e-5)


def test_only_the_best_of_the_search_are_finalists(captures, holdout):
    found = calibrate(captures, holdout, seeds=9, finalists=2)
    search = search_seeds(captures, seeds=9, means=key_means(captures))
    for index, own in search.groupby("layer"):
        best = own.sort_values("objective")["seed"].head(2).tolist()
        assert list(map(int, found.manifest["layers"][str(index)]["finalists"])) == best
        assert found.seeds[index] in best
    assert found.search["objective"].to_numpy() == pytest.approx(search["objective"].to_numpy(), rel=1e-5)


def test_centring_wins_where_keys_have_a_large_mean(capture_of):
    captures, holdout = capture_of(seed=0, offset=20.0), capture_of(seed=1, offset=20.0)
    found = calibrate(captures, holdout, seeds=3)
    plain = calibrate(captures, holdout, seeds=3, centre=False)
    # The mean is some 20 times the spread, which alone needs the codes once it is gone.
    assert (found.table["error_after"] < 0.2 * found.table["error_before"]).all()
    assert (found.table["error_after"] < 0.2 * plain.table["error_after"]).all()
    assert plain.key_means is None
    assert plain.manifest["ingredients"] == ["rotation_seeds"]


def test_without_holdout_every_second_query_judges(capture_of):
    captured = capture_of(seed=0)
    found = calibrate(captured, seeds=4, finalists=4)
    means = key_means(captured)
    for index, layer in captured.layers.items():
        odd = dataclasses.replace(layer, q=layer.q[:, :, 1::2], positions=layer.positions[1::2])
        even = dataclasses.replace(layer, q=layer.q[:, :, ::2], positions=layer.positions[::2])
        errors = layer_errors(odd, [by_hand(found.seeds[index], means, "best")], ["K"])
        entry = found.manifest["layers"][str(index)]
        assert entry["error_after"] == pytest.approx(errors["best", "K"], rel=1e-5)
        half = search_seeds(Capture("tiny", "kolibri1", lambda even=even: {even.index: even}), seeds=4, means=means)
        assert entry["objectives"] == pytest.approx(half["objective"].tolist(), rel=1e-5)


def test_scheme_stores_as_the_transforms_composed_by_hand(captures, holdout):
    found = calibrate(captures, holdout, seeds=5)
    means = key_means(captures)
    assert not torch.equal(found.key_means[4], found.key_means[9])
    found = dataclasses.replace(found, seeds={4: 1, 9: 3})
    scheme = found.scheme()
    assert (scheme.name, scheme.fold_gain) == ("calibrated", True)
    for index, seed in found.seeds.items():
        layer, expected = holdout.layers[index], by_hand(seed, means[index], "by-hand")
        arguments = {"layer": index, "normed_keys": layer.normed_keys, "k_gain": layer.k_gain}
        assert torch.equal(scheme.store_keys(layer.k, **arguments), expected.store_keys(layer.k, **arguments))
        wrong = by_hand(4 - seed, means[index], "wrong-seed")
        assert not torch.equal(scheme.store_keys(layer.k, **arguments), wrong.store_keys(layer.k, **arguments))
        int4 = get_scheme("int4").values
        assert torch.equal(scheme.values.roundtrip(layer.v, index), int4.roundtrip(layer.v, index))
    # 4-bit codes, and an fp16 scale and offset per 16 numbers.
    assert scheme.bits_per_number(16) == 6
    with pytest.raises(ValueError, match="layer is 5"):
        scheme.keys.roundtrip(layer.k, 5)


def test_a_map_is_taken_where_it_helps_what_was_held_out(captures, holdout):
    plain = calibrate(captures, holdout, seeds=5)
    found = calibrate(captures, holdout, seeds=5, finder="balanced")
    assert found.manifest["ingredients"] == ["rotation_seeds", "key_means", "key_maps"]
    assert found.manifest["search"]["finder"] == "balanced"
    assert found.seeds == plain.seeds
    for index, layer in holdout.layers.items():
        rotation = RandomizedHadamard(found.seeds[index])
        base = get_scheme("hadamard-int4")
        mean, matrix = fit_layer(
            [one.layers[index] for one in captures], balanced, base, rotation_matrix(rotation, index, 16)
        )
        fitted = fitted_scheme(base, Chain(Center(mean), Matrix(matrix)))
        error = layer_errors(layer, [fitted], ["K"])["fitted", "K"]
        entry, before = (each.manifest["layers"][str(index)] for each in (found, plain))
        assert entry["error_map"] == pytest.approx(error, rel=1e-5)
        assert entry["error_after"] == min(entry["error_map"], before["error_after"])
        own = layer_errors(layer, [found.scheme()], ["K"])["calibrated", "K"]
        assert own == pytest.approx(entry["error_after"], rel=1e-4)
    assert (found.table["error_map"] < 0.9 * found.table["error_before"]).all()


def test_a_map_that_does_not_help_leaves_the_rotation(captures, holdout, monkeypatch):
    # The range is the last channels', and the noise that queries see the first ones'.
    monkeypatch.setitem(
        FINDERS, "balanced", lambda sample, rotation: torch.diag(torch.logspace(0, 3, 16)).expand(2, -1, -1)
    )
    plain, found = (calibrate(captures, holdout, seeds=3, finder=finder) for finder in (None, "balanced"))
    for index, layer in holdout.layers.items():
        rotation = rotation_matrix(RandomizedHadamard(found.seeds[index]), index, 16)
        assert torch.equal(found.key_maps[index], rotation.expand(2, -1, -1))
        assert torch.equal(found.key_means[index], plain.key_means[index])
        errors = [layer_errors(layer, [each.scheme()], ["K"])["calibrated", "K"] for each in (plain, found)]
        # Products in another order flip few codes.
        assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_without_centring_a_map_has_no_means(captures, holdout):
    found = calibrate(captures, holdout, seeds=2, finder="channel_scales", centre=False)
    assert found.key_means is None and found.key_maps is not None
    assert found.manifest["ingredients"] == ["rotation_seeds", "key_maps"]


def test_unequal_bits_are_taken_where_they_help_what_was_held_out(captures, holdout, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrating, "FINE_COUNTS", (2, 3, 8))
    found, plain = (calibrate(captures, holdout, seeds=2, finder=finder) for finder in ("unequal", "balanced"))
    by_fine = {index: entry["errors_by_fine"] for index, entry in found.manifest["layers"].items()}
    # 8 is half of this head_dim.
    assert all(errors.keys() == {"0", "2", "3"} for errors in by_fine.values())
    sums = {fine: sum(errors[fine] for errors in by_fine.values()) for fine in ("0", "2", "3")}
    assert found.fine_channels == int(min(sums, key=sums.get))
    for index, entry in found.manifest["layers"].items():
        assert entry["error_after"] == entry["errors_by_fine"][str(found.fine_channels)]
        assert entry["errors_by_fine"]["0"] == plain.manifest["layers"][index]["error_after"]
    loaded = Calibration.load(found.save(tmp_path / "found.safetensors"))
    assert loaded.scheme().keys.quantizer == found.scheme().keys.quantizer


def steep(capture):
    """The capture with keys of which few channels hold nearly all, those that queries look at most."""
    sizes = torch.logspace(-3, 0, 16)
    layers = {
        index: dataclasses.replace(layer, k=layer.k * sizes, normed_keys=layer.normed_keys * sizes)
        for index, layer in capture.layers.items()
    }
    return dataclasses.replace(capture, read_layers=lambda: layers)


@pytest.mark.parametrize(
    ("scheme", "quantizer"), [("hadamard-int4", UnequalInteger), ("hadamard-int4-refit", RefitUnequalInteger)]
)
def test_unequal_bits_are_found_where_few_directions_count(capture_of, monkeypatch, scheme, quantizer):
    monkeypatch.setattr(calibrating, "FINE_COUNTS", (4,))
    found = calibrate(steep(capture_of(seed=0)), steep(capture_of(seed=1)), scheme=scheme, seeds=2, finder="unequal")
    assert found.fine_channels == 4
    assert found.scheme().keys.quantizer == quantizer(4)
    for entry in found.manifest["layers"].values():
        assert entry["error_after"] < 0.5 * entry["error_map"]


@pytest.mark.parametrize(
    ("scheme", "asked", "accepted"),
    [
        ("hadamard-int3", {"finder": "unequal"}, "accepted with fine channels: "),
        ("hadamard-int4-refit-kv", {"values": True}, "accepted with transforms of values: "),
    ],
)
def test_a_scheme_that_cannot_have_what_is_asked_is_refused_before_the_search(
    captures, monkeypatch, scheme, asked, accepted
):
    monkeypatch.setattr(calibrating, "search_layers", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(ValueError, match=f"^base is '{scheme}'; {accepted}"):
        calibrate(captures, scheme=scheme, seeds=2, **asked)


def test_a_finder_that_there_is_not_is_refused(captures):
    with pytest.raises(ValueError, match=r"^finder is 'best'; accepted: .*balanced"):
        calibrate(captures, seeds=2, finder="best")


@pytest.mark.parametrize("tokens", [1, 0, 2.0])
def test_tokens_that_cannot_be_are_refused_before_keys_are_read(captures, monkeypatch, tokens):
    monkeypatch.setattr(calibrating, "layer_means", lambda *_: pytest.fail("read"))
    with pytest.raises((TypeError, ValueError), match=f"^tokens is {tokens}; accepted: an integer of at least 2$"):
        calibrate(captures, seeds=2, tokens=tokens)


def test_table_keeps_the_spread_over_all_seeds(captures, holdout):
    found = calibrate(captures, holdout, seeds=9)
    table = found.table
    assert table["layer"].tolist() == [4, 9]
    own = found.search.query("layer == 9")["objective"]
    row = table.iloc[1]
    assert (row["min"], row["median"], row["max"]) == (own.min(), own.median(), own.max())
    assert (table["q1"] < table["q3"]).all()
    assert row["objective"] == found.search.query(f"layer == 9 and seed == {found.seeds[9]}")["objective"].item()


def test_manifest_names_its_captures(captures, holdout):
    manifest = calibrate(captures, holdout, seeds=2).manifest
    assert [capture["text_hash"] for capture in manifest["captures"]] == ["t0", "t1"]
    assert [capture["text_hash"] for capture in manifest["holdout"]] == ["t2"]
    assert len({capture["capture_hash"] for capture in manifest["captures"] + manifest["holdout"]}) == 3
    assert (manifest["num_kv_heads"], manifest["head_dim"], manifest["config_hash"]) == (2, 16, "c0")


def test_layers_with_rope_keep_their_gain(capture_of):
    captures, holdout = capture_of(seed=0, gain=False), capture_of(seed=1, gain=False)
    found = calibrate(captures, holdout, seeds=2)
    expected = captures.layers[4].k[0].double().mean(1)
    torch.testing.assert_close(found.key_means[4].double(), expected, rtol=2**-23, atol=1e-9)


def test_equal_texts_are_refused(capture_of):
    with pytest.raises(ValueError, match="holdout has the text t0, which is calibrated on; accepted: other texts"):
        calibrate(capture_of(seed=0), [capture_of(seed=1), capture_of(seed=2, text_hash="t0")], seeds=2)


@pytest.mark.parametrize("change", [{"model": "other"}, {"config_hash": "c1"}])
def test_other_models_are_refused(capture_of, change):
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"captures have different {name}s"):
        calibrate([capture_of(seed=0), capture_of(seed=1, **change)], seeds=2)
    with pytest.raises(ValueError, match=f"captures have different {name}s"):
        calibrate(capture_of(seed=0), capture_of(seed=1, **change), seeds=2)


def test_a_running_capture_has_no_manifest(capture_of):
    captured = Capture("tiny", "kolibri1", lambda: capture_of().layers)
    with pytest.raises(TypeError, match=r"^captures has a Capture without manifest; accepted: captures from disk$"):
        calibrate(captured)
    with pytest.raises(TypeError, match=r"^captures has a str without manifest; accepted: captures from disk$"):
        calibrate(["folder"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"finalists": 0}, "finalists is 0"), ({"seeds": 0}, "seeds is 0"), ({"scheme": "fp8"}, "scheme is 'fp8'")],
)
def test_bad_arguments_are_named(capture_of, arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate(capture_of(), **arguments)


def test_one_sampled_position_needs_a_holdout(capture_of):
    captured = capture_of(tokens=4)
    with pytest.raises(ValueError, match="captures sampled 1 query position"):
        calibrate(captured, seeds=2)
