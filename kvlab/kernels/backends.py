"""Which of a kernel's implementations runs: CUDA on Hopper, Triton on other GPUs, plain torch anywhere."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from kvlab.checks import check_choice
from kvlab.kernels import nvrtc

BACKENDS = ("cuda", "triton", "naive")

# Asking the driver takes longer than a launch.
_why_no_cuda = functools.cache(nvrtc.why_unavailable)


def choose_backend(
    backend: str | None, device: torch.device, *, head_dim: int, cuda_head_dims: tuple[int, ...] = (128,)
) -> str:
    """Return the backend asked for if it can run, or with None the fastest that can.

    Parameters
    ----------
    backend
        ``"cuda"``, ``"triton"``, ``"naive"`` or None. The plain torch of ``"naive"`` is for tests and for CPUs; on a
        GPU it is never chosen for you.
    device
        Where the tensors are.
    head_dim
        Of the cache.
    cuda_head_dims
        What the CUDA kernel in question is written for; empty where there is none.

    Raises
    ------
    ValueError
        The backend is none of these or cannot run here; the message says why.
    """
    if backend == "naive":
        return backend
    current = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else None
    if current is not None and device.index not in (None, current):
        raise ValueError(f"device is {device}; accepted: the current one, cuda:{current} (see torch.cuda.set_device)")
    if backend is not None:
        check_choice(backend, "backend", BACKENDS)
    elif device.type == "cpu":
        return "naive"
    why_no_cuda = _why_no_cuda(device)
    if why_no_cuda is None and head_dim not in cuda_head_dims:
        accepted = f"head_dim is {head_dim}; accepted: {', '.join(map(str, cuda_head_dims))}"
        why_no_cuda = accepted if cuda_head_dims else "this kernel is not written in CUDA"
    if backend is None and why_no_cuda is None:
        return "cuda"
    reason = why_no_cuda if backend == "cuda" else _why_no_triton(device)
    if reason is not None:
        raise ValueError(f"backend {backend or 'triton'!r} cannot run: {reason}")
    return backend or "triton"


def _why_no_triton(device: torch.device) -> str | None:
    if device.type == "meta":
        return "device is meta; accepted: one with memory"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "device is cpu; accepted: a GPU, or its interpreter (TRITON_INTERPRET=1, set before Python starts)"
    return None
