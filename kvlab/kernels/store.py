"""Store: from the qkv projection's output to rotated queries and 4-bit cells."""

from __future__ import annotations

import ctypes
import functools

import torch

from kvlab.checks import check_number
from kvlab.kernels import nvrtc
from kvlab.kernels.arguments import (
    ALIGNMENT,
    check_alignment,
    check_cache,
    check_dense,
    check_heads,
    check_tensor,
)
from kvlab.kernels.backends import choose_backend
from kvlab.kernels.folding import Folding, Fragments
from kvlab.kernels.naive.norm_rotate_store import norm_rotate_store as naive_store

# As in rotate.cuh: warps of a block, vectors of a warp, quarters of a result.
_WARPS, _VECTORS, _QUARTERS = 4, 32, 4

_BLOCKS_PER_PROCESSOR = 3
"""What registers and shared memory allow: all blocks run from the start."""

_SHARED_BYTES = 2 * 128 * 128 * 2
"""A matrix of two fp16 terms."""

_STORING = 0.45
"""Share of the blocks that store keys and values when there is work for all: on an H200 all then end together."""


def norm_rotate_store(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    folding: Folding,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    debug_keys: torch.Tensor | None = None,
    debug_values: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and store keys and values in the 4-bit cache, reading ``qkv`` once.

    Everything between the projection's output and the codes is float32; the queries are rounded once, at the end.
    Components beyond fp16's range are stored as its largest number and NaN as 0, and no vector touches another's bytes.

    Parameters
    ----------
    qkv
        bfloat16 ``[tokens, (num_heads + 2 num_kv_heads) · head_dim]``, the projection's output; rows at any multiple of
        16 bytes.
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``, written in place.
    slot_mapping
        int64 ``[at most tokens]``: block · block_size + place in the block. Tokens without a slot, or with a negative
        one, get their query only.
    folding
        The layer's matrices and biases, and the quantizers that encode its keys and values.
    num_heads, num_kv_heads
        Query heads, and the KV heads that they share evenly.
    eps
        What the norms add to the mean square.
    out
        Where the queries go: bfloat16 ``[tokens, num_heads, head_dim]``, contiguous; made if None.
    debug_keys, debug_values
        float32 ``[tokens, num_kv_heads, head_dim]``, contiguous: receive the numbers that a kernel encodes ("cuda" and
        "triton"; rows without a slot stay as they are).
    backend
        See `kvlab.kernels.backends.choose_backend`.

    Returns
    -------
    torch.Tensor
        ``out``.

    Raises
    ------
    TypeError, ValueError
        An argument does not have the dtype, shape, layout or device said here; the backend cannot run here, and why.
    """
    num_heads, num_kv_heads = check_heads(num_heads, num_kv_heads)
    if not isinstance(folding, Folding):
        raise TypeError(f"folding is a {type(folding).__name__}; accepted: a kvlab Folding")
    head_dim = folding.check_heads(num_kv_heads).head_dim
    _check_qkv(qkv, (num_heads + 2 * num_kv_heads) * head_dim)
    check_cache(cache, num_kv_heads, head_dim, qkv.device)
    check_tensor(slot_mapping, "slot_mapping")
    if slot_mapping.dtype != torch.int64 or slot_mapping.ndim != 1 or len(slot_mapping) > len(qkv):
        shape = list(slot_mapping.shape)
        raise ValueError(f"slot_mapping is {slot_mapping.dtype} {shape}; accepted: torch.int64 [at most {len(qkv)}]")
    for name, x in (("slot_mapping", slot_mapping), ("folding", folding.q_matrix)):
        if x.device != qkv.device:
            raise ValueError(f"{name} is on {x.device}; accepted: {qkv.device}, where qkv is")
    if check_number(eps, "eps") < 0:
        raise ValueError(f"eps is {eps}; accepted: 0 or more")
    out = qkv.new_empty(len(qkv), num_heads, head_dim) if out is None else out
    check_alignment(check_dense(out, "out", (len(qkv), num_heads, head_dim), (torch.bfloat16,), qkv.device), "out")
    for name, x in (("debug_keys", debug_keys), ("debug_values", debug_values)):
        if x is not None:
            shape = (len(qkv), num_kv_heads, head_dim)
            check_alignment(check_dense(x, name, shape, (torch.float32,), qkv.device), name)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "eps": eps}
    backend = choose_backend(backend, qkv.device, head_dim=head_dim)
    if len(qkv) == 0:
        return out
    if backend == "naive":
        return out.copy_(naive_store(qkv, cache, slot_mapping, folding, **heads))
    if backend == "triton":
        from kvlab.kernels.triton.store import norm_rotate_store as launch
    else:
        launch = _launch_cuda
    launch(qkv, cache, slot_mapping.contiguous(), folding, out=out, debug=(debug_keys, debug_values), **heads)
    return out


class _AffineArgument(ctypes.Structure):
    """``struct Affine`` of ``rotate.cuh``."""

    _fields_ = (
        ("fragments", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("head_stride", ctypes.c_int),
        ("unscale", ctypes.c_float),
    )

    def __init__(self, fragments: Fragments | None, bias: torch.Tensor | None):
        address = 0 if bias is None else bias.data_ptr()
        if fragments is None:
            super().__init__(0, address, 0, 1.0)
        else:
            terms = fragments.terms
            stride = 0 if len(terms) == 1 else terms[0].nbytes // ALIGNMENT
            super().__init__(terms.data_ptr(), address, stride, fragments.unscale)


def _launch_cuda(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    folding: Folding,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: torch.Tensor,
    debug: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    group = num_heads // num_kv_heads
    blocks = _BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(qkv.device).multi_processor_count // num_kv_heads
    cell_blocks = min(-(-len(slot_mapping) // _VECTORS), max(1, int(_STORING * blocks / 2)))
    query_warps = max(1, blocks - 2 * cell_blocks) * _WARPS
    tiles = -(-len(qkv) * group // _VECTORS)
    # While a quarter of a tile for every warp is enough, that is what a warp gets.
    quarters = 1 if tiles * _QUARTERS <= query_warps else _QUARTERS
    query_blocks = -(-min(tiles * _QUARTERS // quarters, query_warps) // _WARPS)
    _kernel(folding.head_dim, num_kv_heads, group, *folding.refits, folding.fine)(
        (num_kv_heads * (2 * cell_blocks + query_blocks),),
        32 * _WARPS,
        qkv,
        ctypes.c_int64(qkv.stride(0)),
        len(qkv),
        slot_mapping,
        len(slot_mapping),
        cell_blocks,
        query_blocks,
        quarters,
        float(eps),
        _AffineArgument(folding.q_fragments, None),
        _AffineArgument(folding.k_fragments, folding.k_bias),
        _AffineArgument(folding.v_fragments, folding.v_bias),
        nvrtc.CacheArgument(cache),
        out,
        *debug,
        shared_bytes=_SHARED_BYTES,
        overlap_previous=True,
    )


@functools.cache
def _kernel(*shape: int) -> nvrtc.Kernel:
    names = ("HEAD_DIM", "NUM_KV_HEADS", "GROUP", "REFIT_KEYS", "REFIT_VALUES", "FINE_KEYS")
    defines = dict(zip(names, map(int, shape), strict=True))
    return nvrtc.Kernel("norm_rotate_store.cu", "norm_rotate_store", **defines)


def _check_qkv(qkv: torch.Tensor, width: int) -> None:
    check_tensor(qkv, "qkv")
    if qkv.dtype != torch.bfloat16 or qkv.ndim != 2 or qkv.shape[1] != width:
        raise ValueError(f"qkv is {qkv.dtype} {list(qkv.shape)}; accepted: torch.bfloat16 [tokens, {width}]")
    if qkv.stride(1) != 1 or qkv.stride(0) * qkv.element_size() % ALIGNMENT:
        raise ValueError(f"qkv has strides {qkv.stride()}; accepted: dense rows at multiples of {ALIGNMENT} bytes")
    check_alignment(qkv, "qkv")
