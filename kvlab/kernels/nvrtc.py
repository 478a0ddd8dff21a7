"""CUDA kernels compiled at run time: NVRTC through cuda-bindings, cached on disk, launched on torch's current stream.

No nvcc, no headers, no build step: a source of ``cuda/`` and its compile-time constants become a cubin for the GPU at
hand the first time they are needed (about a second), and a file afterwards. The kernels use Hopper's bulk copies and
matrix instructions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from pathlib import Path

import torch

from kvlab.kernels.layout import REGION_TOKENS
from kvlab.paths import cache_folder, written_whole

_SOURCES = Path(__file__).parent / "cuda"
_ARCHITECTURE = "sm_90a"
_DIGEST_BYTES = hashlib.sha256().digest_size
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


def why_unavailable(device: torch.device | str = "cuda") -> str | None:
    """Say in one line why the CUDA kernels cannot run on a device, or return None if they can."""
    if torch.device(device).type != "cuda":
        return f"device is {device}; accepted: a CUDA device of compute capability 9.0 (Hopper)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; accepted: a CUDA device of compute capability 9.0 (Hopper)"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; accepted: 9.0 (Hopper)"
    try:
        _bindings()
    except ImportError as error:
        return str(error)
    return None


def compile_source(name: str, defines: dict[str, int] | None = None, architecture: str = _ARCHITECTURE) -> bytes:
    """Compile one source of ``cuda/`` to a cubin; needs no GPU.

    Parameters
    ----------
    name
        File name, as ``"decode.cu"``.
    defines
        The source's compile-time constants.
    architecture
        A real architecture, as ``"sm_90a"``.

    Raises
    ------
    ImportError
        cuda-bindings or NVRTC's library is missing; the message says what to install.
    RuntimeError
        NVRTC refuses the source; the message is its log.
    """
    _, nvrtc = _bindings()
    options = [f"--gpu-architecture={architecture}", *_OPTIONS]
    options += [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    # Included headers are handed over by name: NVRTC then opens no file itself.
    headers = {path.name: path.read_bytes() for path in sorted(_SOURCES.glob("*.cuh"))}
    source = (_SOURCES / name).read_bytes()
    digest = hashlib.sha256(repr((_nvrtc_version(), options, source, headers)).encode()).hexdigest()
    file_name = f"{Path(name).stem}-{digest[:32]}.cubin"
    if cubin := _read_cached(file_name):
        return cubin
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source, name.encode(), len(headers), list(headers.values()), [key.encode() for key in headers]
        )
    )
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            text = log.decode(errors="replace").rstrip("\0 \n")
            raise RuntimeError(f"NVRTC could not compile {name} for {architecture}:\n{text}")
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))
    _write_cached(file_name, cubin)
    return cubin


class Kernel:
    """One ``__global__`` function of a compiled source.

    Parameters
    ----------
    source, name
        File of ``cuda/`` and function in it (``extern "C"``).
    defines
        The source's compile-time constants.
    """

    def __init__(self, source: str, name: str, **defines: int):
        self.name = name
        driver, _ = _bindings()
        library = _library(source, tuple(sorted(defines.items())))
        self._kernel = _checked(driver.cuLibraryGetKernel(library, name.encode()))
        self._function = driver.CUfunction(int(self._kernel))
        self._shared: dict[int, int] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        threads: int,
        *arguments: torch.Tensor | int | float | ctypes.Structure | ctypes._SimpleCData | None,
        shared_bytes: int = 0,
        overlap_previous: bool = False,
    ) -> None:
        """Launch on the current stream of the current device.

        Parameters
        ----------
        grid
            Blocks in x, y, z; missing ones are 1.
        threads
            Threads per block.
        arguments
            In the function's order: a tensor or None is a pointer, an int is 32 bits wide, a float is a float; a ctypes
            number or structure is passed as it is.
        shared_bytes
            Dynamic shared memory per block.
        overlap_previous
            Let blocks start before the previous kernel of the stream ends (programmatic dependent launch): the kernel
            itself waits with ``griddepcontrol.wait`` before it reads what that one wrote.
        """
        driver, _ = _bindings()
        device = torch.cuda.current_device()
        if shared_bytes > self._shared.get(device, 0):
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel, device))
            self._shared[device] = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        if overlap_previous:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values = [_argument(x) for x in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        (status,) = driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(addresses), 0)
        if int(status) != 0:
            raise RuntimeError(f"CUDA cannot launch {self.name}: {status.name}")


class CacheArgument(ctypes.Structure):
    """``struct Cache`` of ``region.cuh``: a paged cache that was checked, its strides in bytes."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("regions_per_block", ctypes.c_int),
    )

    def __init__(self, cache: torch.Tensor):
        super().__init__(cache.data_ptr(), cache.stride(0), cache.stride(1), cache.shape[2] // REGION_TOKENS)


def _argument(x: object) -> ctypes.Structure | ctypes._SimpleCData:
    if x is None or isinstance(x, torch.Tensor):
        return ctypes.c_void_p(0 if x is None else x.data_ptr())
    if isinstance(x, (ctypes.Structure, ctypes._SimpleCData)):
        return x
    return ctypes.c_int(x) if isinstance(x, int) else ctypes.c_float(x)


@functools.cache
def _library(source: str, defines: tuple[tuple[str, int], ...]) -> object:
    driver, _ = _bindings()
    # torch has made the device's primary context current by the time a kernel is needed.
    torch.cuda.current_stream()
    return _checked(driver.cuLibraryLoadData(compile_source(source, dict(defines)), [], [], 0, [], [], 0))


@functools.cache
def _bindings() -> tuple[object, object]:
    try:
        from cuda.bindings import driver, nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the CUDA kernels are compiled at run time and need cuda-bindings and NVRTC ({error}); "
            "pip install 'cuda-bindings>=13' nvidia-cuda-nvrtc, or use the Triton kernels"
        ) from error
    return driver, nvrtc


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    return _checked(_bindings()[1].nvrtcVersion())


def _checked(answer: tuple) -> object:
    """Return what a binding returned beside its status, which has to be success."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA reports {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _read_cached(file_name: str) -> bytes | None:
    """Return a compiled kernel that is whole: a file is its SHA-256, then the cubin."""
    with contextlib.suppress(OSError, RuntimeError):
        content = (cache_folder() / "kernels" / file_name).read_bytes()
        digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(cubin).digest() == digest:
            return cubin
    return None


def _write_cached(file_name: str, cubin: bytes) -> None:
    """Keep a compiled kernel; without a folder to write to, every process compiles anew."""
    # RuntimeError: there is no home folder.
    with contextlib.suppress(OSError, RuntimeError):
        path = cache_folder() / "kernels" / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as scratch:
            scratch.write_bytes(hashlib.sha256(cubin).digest() + cubin)
