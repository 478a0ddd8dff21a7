import hashlib
import sys

import pytest
import torch

from kvlab.kernels import nvrtc

pytestmark = pytest.mark.unit

ELF = b"\x7fELF"


@pytest.fixture
def bindings():
    """The tests below compile: they need cuda-bindings and NVRTC, and no GPU."""
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc._bindings()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_bindings(monkeypatch):
    # None makes Python's import statement fail.
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc._bindings.cache_clear()
    yield
    nvrtc._bindings.cache_clear()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "number.cuh").write_text("#pragma once\nconstexpr int NUMBER = 3;\n")
    (folder / "fill.cu").write_text(
        '#include "number.cuh"\nextern "C" __global__ void fill(int* x) { x[threadIdx.x] = NUMBER + EXTRA; }\n'
    )
    monkeypatch.setattr(nvrtc, "_SOURCES", folder)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return folder


def cached(tmp_path):
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_compiles_without_a_gpu(bindings, sources, tmp_path):
    cubin = nvrtc.compile_source("fill.cu", {"EXTRA": 4})
    assert cubin.startswith(ELF)
    assert b"fill" in cubin
    (file,) = cached(tmp_path)
    assert file.read_bytes() == hashlib.sha256(cubin).digest() + cubin


def test_cached_file_is_used_instead_of_compiling(bindings, sources, tmp_path):
    nvrtc.compile_source("fill.cu", {"EXTRA": 4})
    (file,) = cached(tmp_path)
    file.write_bytes(hashlib.sha256(b"what the file holds").digest() + b"what the file holds")
    assert nvrtc.compile_source("fill.cu", {"EXTRA": 4}) == b"what the file holds"


@pytest.mark.parametrize("left", [0, 10, 1000])
def test_a_damaged_file_is_compiled_again(bindings, sources, tmp_path, left):
    cubin = nvrtc.compile_source("fill.cu", {"EXTRA": 4})
    (file,) = cached(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    assert nvrtc.compile_source("fill.cu", {"EXTRA": 4}) == cubin
    assert cached(tmp_path) == [file]
    assert file.read_bytes() == whole


@pytest.mark.parametrize("change", ["source", "header", "define"])
def test_any_change_compiles_anew(bindings, sources, tmp_path, change):
    first = nvrtc.compile_source("fill.cu", {"EXTRA": 4})
    if change != "define":
        path = sources / {"source": "fill.cu", "header": "number.cuh"}[change]
        path.write_text(path.read_text().replace("+ EXTRA", "- EXTRA").replace("= 3;", "= 5;"))
    second = nvrtc.compile_source("fill.cu", {"EXTRA": 4 + (change == "define")})
    assert second != first
    assert len(cached(tmp_path)) == 2


def test_error_is_the_compilers_log(bindings, sources, tmp_path):
    (sources / "broken.cu").write_text('extern "C" __global__ void f() { undeclared_name = 1; }\n')
    with pytest.raises(RuntimeError) as caught:
        nvrtc.compile_source("broken.cu")
    message = str(caught.value)
    assert message.startswith("NVRTC could not compile broken.cu for sm_90a:\n")
    assert "broken.cu(1)" in message
    assert "undeclared_name" in message
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_costs_only_time(bindings, sources, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file" / "cache"))
    assert nvrtc.compile_source("fill.cu", {"EXTRA": 4}).startswith(b"\x7fELF")


def test_missing_bindings_say_what_to_install(no_bindings):
    with pytest.raises(ImportError, match=r"pip install 'cuda-bindings>=13'.*Triton") as caught:
        nvrtc.compile_source("decode.cu")
    assert "\n" not in str(caught.value)


def test_missing_bindings_make_the_kernels_unavailable(no_bindings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "cuda-bindings" in nvrtc.why_unavailable("cuda")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (9, 1)])
def test_other_gpus_are_named(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = nvrtc.why_unavailable("cuda")
    assert reason == f"the GPU has compute capability {capability[0]}.{capability[1]}; accepted: 9.0 (Hopper)"


def test_no_device():
    assert "device is cpu; accepted: a CUDA device" in nvrtc.why_unavailable("cpu")


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device" in nvrtc.why_unavailable("cuda")
