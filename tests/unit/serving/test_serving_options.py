import pytest

from kvlab.serving.options import Options

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, "text", {"kolibri1": None}], ids=str)
def test_a_server_that_does_not_ask(config):
    assert Options.read(config) is None


def test_what_is_asked_for(tmp_path):
    assert Options.read({"kolibri1": {"kv_cache": "hadamard-int4"}}) == Options("hadamard-int4")
    for name in ("hadamard-int4", "hadamard-int4-refit", "hadamard-int4-refit-kv"):
        assert Options.read({"kolibri1": {"kv_cache": name, "rotation_seed": 7}}) == Options(name, rotation_seed=7)
    file = tmp_path / "calibration.safetensors"
    file.touch()
    options = Options.read({"kolibri1": {"kv_cache": "calibrated", "calibration": str(file)}})
    assert options == Options("calibrated", calibration=str(file))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("hadamard-int4", "additional_config.kolibri1 is 'hadamard-int4'; accepted: an object"),
        ({}, "kolibri1.kv_cache is missing; accepted: hadamard-int4, hadamard-int4-refit, .*-kv, int4, calibrated"),
        (
            {"kv_cache": "int3"},
            "kolibri1.kv_cache is 'int3'; accepted: hadamard-int4, hadamard-int4-refit, .*-kv, int4, calibrated",
        ),
        ({"kv_cache": True}, "kolibri1.kv_cache is True"),
        ({"kv-cache": "int4"}, "kolibri1 has the option 'kv-cache'; accepted: kv_cache, rotation_seed, calibration"),
        ({"kv_cache": "hadamard-int4", "rotation_seed": -1}, "kolibri1.rotation_seed is -1"),
        ({"kv_cache": "hadamard-int4", "rotation_seed": "7"}, "kolibri1.rotation_seed is '7'"),
        ({"kv_cache": "int4", "rotation_seed": 7}, "rotation_seed is given with kv_cache 'int4'"),
        ({"kv_cache": "calibrated"}, "kolibri1.calibration is None with kv_cache 'calibrated'"),
        ({"kv_cache": "int4", "calibration": "x"}, "kolibri1.calibration is 'x' with kv_cache 'int4'"),
        ({"kv_cache": "calibrated", "calibration": "/none"}, "kolibri1.calibration is '/none'; accepted: a file that"),
    ],
)
def test_options_that_are_none(section, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Options.read({"kolibri1": section})
