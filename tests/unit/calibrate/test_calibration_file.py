import copy
import dataclasses
import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from kvlab.calibrate import Calibration, calibrate

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def calibration(capture_of):
    return calibrate(capture_of(seed=0), capture_of(seed=1), seeds=4)


def parts(calibration):
    tensors = {
        "layers": torch.tensor([4, 9]),
        "rotation_seeds": torch.tensor([calibration.seeds[4], calibration.seeds[9]]),
        "key_means": torch.stack([calibration.key_means[4], calibration.key_means[9]]),
    }
    return tensors, copy.deepcopy(calibration.manifest)


def write(path, tensors, manifest):
    save_file(tensors, path, {"kvlab": manifest if isinstance(manifest, str) else json.dumps(manifest)})
    return path


@pytest.mark.parametrize("finder", [None, "balanced"])
@pytest.mark.parametrize("centre", [True, False])
def test_round_trip(tmp_path, capture_of, centre, finder):
    found = calibrate(capture_of(seed=0), capture_of(seed=1), seeds=4, centre=centre, finder=finder)
    loaded = Calibration.load(found.save(tmp_path / "c.safetensors"), config_hash="c0")
    assert loaded.seeds == found.seeds
    assert loaded.manifest == found.manifest
    assert (loaded.key_means is None) == (not centre)
    if centre:
        assert all(torch.equal(loaded.key_means[layer], mean) for layer, mean in found.key_means.items())
    assert (loaded.key_maps is None) == (finder is None)
    if finder:
        assert all(torch.equal(loaded.key_maps[layer], matrix) for layer, matrix in found.key_maps.items())
    assert loaded.table.equals(found.table)
    assert repr(loaded.scheme()) == repr(found.scheme())


def test_equal_calibrations_give_equal_bytes(tmp_path, capture_of, calibration):
    again = calibrate(capture_of(seed=0), capture_of(seed=1), seeds=4)
    again = dataclasses.replace(again, manifest=dict(reversed({**again.manifest, **_date(calibration)}.items())))
    one, two = calibration.save(tmp_path / "a"), again.save(tmp_path / "b")
    assert one.read_bytes() == two.read_bytes()
    assert Calibration.load(one).save(tmp_path / "c").read_bytes() == one.read_bytes()


def _date(calibration):
    return {"date": calibration.manifest["date"]}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, calibration):
    path = calibration.save(tmp_path / "c.safetensors")
    before = path.read_bytes()

    def fail(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(calibration, seeds={4: 99, 9: 98}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "kvlab-calibration/2"}, "of format 'kvlab-calibration/2'; accepted: 'kvlab-calibration/1'"),
        ({"ingredients": ["rotation_seeds", "key_means", "warp"]}, "ingredient 'warp'; accepted by this kvlab"),
        ({"ingredients": ["rotation_seeds", "warp", 3]}, "ingredient 3; accepted by this kvlab"),
        ({"ingredients": ["rotation_seeds"]}, r"tensors \['key_means', 'layers', 'rotation_seeds'\]"),
        ({"head_dim": 32}, r"key_means of layer 4 has shape \[2, 16\]; accepted: \[2, 32\]"),
        ({"layers": {}}, r"seeds for layers \[4, 9\]; accepted: those of its manifest"),
        ({"ingredients": None}, "no valid calibration file"),
        ({"scheme": "int4"}, "scheme is 'int4'; accepted: one whose keys have a randomized Hadamard rotation"),
        ({"scheme": "hadamard-int5"}, "scheme is 'hadamard-int5'"),
        ({"layers": {"4": {}, "x": {}}}, r"seeds for layers \[4, 9\]; accepted: those of its manifest"),
        ({"layers": {"4": None, "9": None}}, "has a damaged manifest; accepted: what kvlab calibrate wrote"),
        ({"layers": [4, 9]}, "has a damaged manifest"),
        ({"search": {"seeds": [0, 1]}}, "has a damaged manifest"),
        ({"search": {"seeds": [5, 6, 7, 8]}}, "has a damaged manifest"),
        ({"captures": [{"text_hash": "t0"}]}, "has a damaged manifest"),
        ({"holdout": None}, "has a damaged manifest"),
    ],
)
def test_other_manifests_are_refused(tmp_path, calibration, change, message):
    tensors, manifest = parts(calibration)
    path = write(tmp_path / "c", tensors, {**manifest, **change})
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fine", "message"),
    [
        (torch.tensor([8]), "fine is 8; accepted at head_dim 16: less than 8"),
        (torch.tensor([-1]), "fine_channels is -1; accepted: an integer of at least 0"),
        (torch.tensor([0]), "disagrees with its manifest on fine_channels; accepted: both or neither"),
        (torch.tensor([2.0]), r"fine_channels is torch.float32 \[1\]; accepted: int64 \[1\]"),
        (torch.tensor([2, 2]), r"fine_channels is torch.int64 \[2\]; accepted: int64 \[1\]"),
    ],
    ids=str,
)
def test_fine_channels_that_cannot_be_are_refused(tmp_path, capture_of, fine, message):
    found = calibrate(capture_of(seed=0), capture_of(seed=1), seeds=2, finder="balanced")
    tensors, manifest = parts(found)
    manifest["ingredients"].append("fine_channels")
    tensors |= {"key_maps": torch.stack([found.key_maps[4], found.key_maps[9]]), "fine_channels": fine}
    path = write(tmp_path / "c", tensors, manifest)
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


def test_fine_channels_of_a_scheme_that_has_none_are_refused_when_read(tmp_path, capture_of):
    found = calibrate(capture_of(seed=0), capture_of(seed=1), seeds=2, finder="balanced")
    tensors, manifest = parts(found)
    manifest["ingredients"].append("fine_channels")
    manifest["scheme"] = "hadamard-int3"
    maps = torch.stack([found.key_maps[4], found.key_maps[9]])
    path = write(tmp_path / "c", {**tensors, "key_maps": maps, "fine_channels": torch.tensor([2])}, manifest)
    with pytest.raises(ValueError, match=r"c: base is 'hadamard-int3'; accepted with fine channels: "):
        Calibration.load(path)


def test_fine_channels_without_maps_are_refused(tmp_path, calibration):
    tensors, manifest = parts(calibration)
    manifest["ingredients"].append("fine_channels")
    path = write(tmp_path / "c", {**tensors, "fine_channels": torch.tensor([2])}, manifest)
    with pytest.raises(ValueError, match="calibration has fine_channels without key_maps; accepted: both"):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_means": torch.full((2, 2, 16), torch.nan)}, "key_means of layer 4 has a non-finite component"),
        ({"key_means": torch.zeros(2, 16)}, r"key_means is torch.float32 \[2, 16\]"),
        ({"key_means": torch.zeros(1, 2, 16)}, r"key_means is torch.float32 \[1, 2, 16\]"),
        ({"key_means": torch.zeros(2, 2, 16, dtype=torch.float64)}, "key_means is torch.float64"),
        ({"rotation_seeds": torch.tensor([0, -1])}, "rotation seed is -1"),
        ({"rotation_seeds": torch.tensor([0])}, r"rotation_seeds is torch.int64 \[1\] for layers torch.int64 \[2\]"),
        ({"rotation_seeds": torch.tensor([0.0, 1.0])}, "rotation_seeds is torch.float32"),
        ({"layers": torch.tensor([4, 4])}, r"layers \[4, 4\]; accepted: each layer once"),
        ({"warp": torch.zeros(1)}, "calibration has the tensors"),
    ],
)
def test_other_tensors_are_refused(tmp_path, calibration, change, message):
    tensors, manifest = parts(calibration)
    path = write(tmp_path / "c", {**tensors, **change}, manifest)
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (torch.full((2, 2, 16, 16), torch.nan), "key_maps of layer 4 has a non-finite component"),
        (torch.zeros(2, 16, 16), r"key_maps is torch.float32 \[2, 16, 16\]; accepted: float32 \[2, 2, 16, 16\]"),
        (torch.ones(2, 2, 16, 8), r"key_maps of layer 4 has shape \[2, 16, 8\]; accepted: \[2, 16, 16\]"),
        (torch.ones(2, 2, 16, 16), r"key_maps\[4\] has condition number"),
        (None, "calibration has the tensors"),
    ],
)
def test_other_maps_are_refused(tmp_path, calibration, maps, message):
    tensors, manifest = parts(calibration)
    manifest["ingredients"].append("key_maps")
    path = write(tmp_path / "c", tensors if maps is None else {**tensors, "key_maps": maps}, manifest)
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_refused(tmp_path, calibration):
    tensors, manifest = parts(calibration)
    del tensors["key_means"]
    with pytest.raises(ValueError, match="calibration has the tensors"):
        Calibration.load(write(tmp_path / "c", tensors, manifest))


@pytest.mark.parametrize(
    ("field", "value"), [("objectives", ["x"] * 4), ("error_before", "x"), ("error_after", 10**400)]
)
def test_layers_that_hold_no_numbers_are_refused(tmp_path, calibration, field, value):
    tensors, manifest = parts(calibration)
    manifest["layers"]["9"][field] = value
    with pytest.raises(ValueError, match="has a damaged manifest; accepted: what kvlab calibrate wrote"):
        Calibration.load(write(tmp_path / "c", tensors, manifest))


def test_a_manifest_too_deep_to_be_read_is_refused(tmp_path, calibration):
    tensors, _ = parts(calibration)
    path = write(tmp_path / "c", tensors, "[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="is no valid calibration file"):
        Calibration.load(path)


@pytest.mark.parametrize("manifest", ["null", "[]", "{", '"text"', "{}"])
def test_other_safetensors_are_refused(tmp_path, calibration, manifest):
    path = write(tmp_path / "c", {"weight": torch.zeros(2)}, manifest)
    with pytest.raises(ValueError, match="c"):
        Calibration.load(path)


def test_a_file_without_metadata_is_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "c")
    with pytest.raises(ValueError, match="is no calibration file"):
        Calibration.load(tmp_path / "c")


def test_truncated_and_foreign_files_are_refused(tmp_path, calibration):
    data = calibration.save(tmp_path / "whole").read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    for size in (0, 5, 8 + header // 2, 8 + header, len(data) - 1):
        (tmp_path / "c").write_bytes(data[:size])
        with pytest.raises(ValueError, match="cannot be read as safetensors"):
            Calibration.load(tmp_path / "c")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        Calibration.load(tmp_path / "absent")


def test_another_model_is_refused(tmp_path, calibration):
    path = calibration.save(tmp_path / "c")
    with pytest.raises(ValueError, match="calibration is of tiny, config_hash c0; accepted: c1"):
        Calibration.load(path, config_hash="c1")


def test_applies_to_its_model_only(calibration):
    calibration.check_applies("c0", [4, 9], 2, 16)
    calibration.check_applies("c0", [9], 2, 16)
    for arguments, message in (
        (("c1", [4, 9], 2, 16), "config_hash c0; accepted: c1"),
        (("c0", [4, 9], 4, 16), "num_kv_heads 2; accepted: 4"),
        (("c0", [4, 9], 2, 128), "head_dim 16; accepted: 128"),
        (("c0", [4, 9, 14], 2, 16), r"calibration lacks layers \[14\]"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration.check_applies(*arguments)
