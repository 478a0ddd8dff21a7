import subprocess
import sys

import pytest

import kvlab

pytestmark = pytest.mark.unit

PUBLIC = {
    "__version__", "apply", "attention_error_table", "attention_output_error", "calibrate", "Capture",
    "capture", "checks", "codec", "default_model", "default_text", "figures", "FoldedQKNorm", "get_scheme",
    "LayerCapture", "list_schemes", "loss_table", "measure", "models", "open_capture", "outlier_ratio",
    "outlier_table", "paired_bootstrap", "plots", "quantizers", "randomized_hadamard", "RandomizedHadamard",
    "recording", "register_scheme", "relative_error", "rounding_table", "Scheme", "schemes", "stats", "StoredAs",
    "tables", "tokenize", "transforms",
}  # fmt: skip


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names_are_these_and_all_load():
    assert set(kvlab.__all__) == PUBLIC == set(dir(kvlab))
    for name in PUBLIC:
        assert getattr(kvlab, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'kvlab' has no attribute 'quantise'"):
        _ = kvlab.quantise


@pytest.mark.parametrize("module", ["kvlab", "kvlab.cli"])
def test_importing_is_light(module):
    heavy = "torch transformers triton vllm pandas matplotlib scipy"
    assert python(f"import sys, {module}; print([m for m in '{heavy}'.split() if m in sys.modules])").strip() == "[]"


def test_importing_is_quick():
    code = "import time; start = time.perf_counter(); import kvlab; print(time.perf_counter() - start)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_using_the_library_leaves_cuda_alone():
    code = "import kvlab, torch; kvlab.get_scheme('hadamard-int4'); print(torch.cuda.is_initialized())"
    assert python(code).strip() == "False"
