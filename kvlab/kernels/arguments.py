"""What the kernels ask of their tensors: a pointer says nothing about dtype, shape or place."""

from __future__ import annotations

import torch

from kvlab.checks import check_integer
from kvlab.kernels.layout import cell_bytes, check_layout

ALIGNMENT = 16
"""Bytes that a kernel reads or writes at once."""


def check_heads(num_heads: object, num_kv_heads: object) -> tuple[int, int]:
    """Check that query heads share KV heads evenly and return both numbers.

    Raises
    ------
    TypeError, ValueError
        One is no positive integer, or the first no multiple of the second.
    """
    kv_heads = check_integer(num_kv_heads, "num_kv_heads", minimum=1)
    heads = check_integer(num_heads, "num_heads", minimum=1)
    if heads % kv_heads:
        raise ValueError(f"num_heads is {num_heads}; accepted: a multiple of num_kv_heads {num_kv_heads}")
    return heads, kv_heads


def check_dense(
    x: object, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """Check a tensor of which the kernels take the address and return it.

    Raises
    ------
    TypeError
        ``x`` is no tensor.
    ValueError
        It has another shape, dtype or device, or is not contiguous.
    """
    check_tensor(x, name)
    accepted = f"{' or '.join(map(str, dtypes))} {list(shape)}, contiguous, on {device}"
    if x.dtype not in dtypes or tuple(x.shape) != tuple(shape) or not x.is_contiguous() or x.device != device:
        what = "" if x.is_contiguous() else ", not contiguous,"
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}{what} on {x.device}; accepted: {accepted}")
    return x


def check_cache(
    cache: object, num_kv_heads: int, head_dim: int, device: torch.device, *, block_size: int | None = None
) -> None:
    """Check a paged cache; with ``block_size`` None blocks may be of any size.

    Raises
    ------
    TypeError, ValueError
        ``cache`` is no such cache, or on another device.
    """
    check_layout(cache)
    expected = (num_kv_heads, cache.shape[2] if block_size is None else block_size, cell_bytes(head_dim))
    if tuple(cache.shape[1:]) != expected or cache.device != device:
        block = "block_size" if block_size is None else block_size
        raise ValueError(
            f"cache has shape {list(cache.shape)} on {cache.device}; "
            f"accepted: [num_blocks, {num_kv_heads}, {block}, {expected[2]}] on {device}"
        )
    check_alignment(cache, "cache")


def check_block_table(block_table: object, device: torch.device, *, batch: int | None = None) -> None:
    """Check a block table of ``batch`` rows, or of any number of rows.

    Raises
    ------
    TypeError, ValueError
        It is no int32 matrix with dense rows, or has another number of rows, or is on another device.
    """
    check_tensor(block_table, "block_table")
    rows = "batch" if batch is None else batch
    if (
        block_table.dtype != torch.int32
        or block_table.ndim != 2
        or batch not in (None, len(block_table))
        or block_table.shape[1] == 0
        or (block_table.shape[1] > 1 and block_table.stride(1) != 1)
        or block_table.device != device
    ):
        raise ValueError(
            f"block_table is {block_table.dtype} {list(block_table.shape)} on {block_table.device}; "
            f"accepted: torch.int32 [{rows}, max_blocks of 1 or more], its rows dense, on {device}"
        )


def check_tensor(x: object, name: str) -> None:
    """Check that ``x`` is a tensor.

    Raises
    ------
    TypeError
        It is none.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; accepted: a tensor")


def check_alignment(x: torch.Tensor, name: str) -> None:
    """Check that ``x`` starts where the kernels can read 16 bytes at once.

    Raises
    ------
    ValueError
        It does not.
    """
    if not x.is_meta and x.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} starts at {x.data_ptr():#x}; accepted: a multiple of {ALIGNMENT} bytes")


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the device with its index, as tensors have it.

    Raises
    ------
    ValueError
        ``device`` is none, or one without memory.
    """
    accepted = "accepted: a device with memory, as 'cuda' or 'cpu'"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; {accepted}") from error
    if resolved.type == "meta":
        raise ValueError(f"device is {device!r}; {accepted}")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}; accepted: 'cpu' here, torch finds no CUDA device")
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
