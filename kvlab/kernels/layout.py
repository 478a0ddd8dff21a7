"""Where the bytes of the paged 4-bit cache lie: the one place that every kernel, its twin and the codec share.

A cache is uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``. Of each (block, head) the last two dimensions
are one dense run of ``block_size / 32`` *regions*; a region holds keys and values of 32 tokens in the order in which
the decode kernel's tensor-core instructions read them. The folder's README derives that order; a token owns whole bytes
everywhere, so that storing needs no atomics.

The functions here convert between regions and what `kvlab.codec` writes, on any device. The CUDA and Triton kernels
compute the same addresses; their tests hold them to these functions.
"""

from __future__ import annotations

import torch

REGION_TOKENS = 32
METADATA_BYTES = 8
"""Per token: scale and offset of the key and of the value, four fp16 numbers."""

HEAD_DIMS = (64, 128, 256)


def cell_bytes(head_dim: int) -> int:
    """Bytes of one token and head, key and value together (136 at 128)."""
    return head_dim + METADATA_BYTES


def region_bytes(head_dim: int) -> int:
    """Bytes of 32 tokens of one head (4,352 at 128)."""
    return REGION_TOKENS * cell_bytes(head_dim)


def pack_regions(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Order the codec's bytes of 32 tokens as the kernels read them.

    Parameters
    ----------
    keys, values
        uint8 ``[..., 32, head_dim / 2 + 4]``, as `kvlab.codec.encode` returns them.

    Returns
    -------
    torch.Tensor
        uint8 ``[..., region_bytes(head_dim)]``.
    """
    key_codes, key_metadata = _split(keys)
    value_codes, value_metadata = _split(values)
    metadata = torch.cat([_order_metadata(x) for x in (*key_metadata, *value_metadata)], dim=-1)
    return torch.cat([_order_keys(key_codes), _order_values(value_codes), metadata], dim=-1)


def unpack_regions(regions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert `pack_regions`.

    Parameters
    ----------
    regions
        uint8 ``[..., region_bytes(head_dim)]``.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, uint8 ``[..., 32, head_dim / 2 + 4]`` each, as `kvlab.codec.decode` reads them.
    """
    head_dim = regions.shape[-1] // REGION_TOKENS - METADATA_BYTES
    codes = REGION_TOKENS * head_dim // 2
    keys, values, metadata = regions.split([codes, codes, REGION_TOKENS * METADATA_BYTES], dim=-1)
    key_scale, key_offset, value_scale, value_offset = (_restore_metadata(x) for x in metadata.chunk(4, dim=-1))
    return (
        torch.cat([_codec_bytes(_restore_keys(keys, head_dim)), key_scale, key_offset], dim=-1),
        torch.cat([_codec_bytes(_restore_values(values, head_dim)), value_scale, value_offset], dim=-1),
    )


def write_cells(cache: torch.Tensor, slot_mapping: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the codec's bytes of some tokens into a paged cache.

    Parameters
    ----------
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``, written in place.
    slot_mapping
        int64 ``[tokens]``: block · block_size + place in the block; a negative slot is skipped.
    keys, values
        uint8 ``[at least as many, num_kv_heads, head_dim / 2 + 4]``; tokens without a slot are skipped.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    keys, values = keys[: len(kept)][kept], values[: len(kept)][kept]
    token, per_block = slots % REGION_TOKENS, cache.shape[2] // REGION_TOKENS
    touched, which = (slots // REGION_TOKENS).unique(return_inverse=True)
    regions, at = region_view(cache), (touched // per_block, slice(None), touched % per_block)
    # Whole regions are read, changed and written back: this is a reference.
    old_keys, old_values = unpack_regions(regions[at])
    old_keys[which, :, token], old_values[which, :, token] = keys, values
    regions[at] = pack_regions(old_keys, old_values)


def read_cells(cache: torch.Tensor, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the codec's bytes of one sequence out of a paged cache.

    Parameters
    ----------
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``.
    blocks
        integer ``[at least ⌈tokens / block_size⌉]``, one row of a block table.
    tokens
        How many tokens the sequence has.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, uint8 ``[num_kv_heads, tokens, head_dim / 2 + 4]`` each.
    """
    block_size = cache.shape[2]
    regions = region_view(cache)[blocks[: -(-tokens // block_size)].long()]
    return tuple(cells.transpose(0, 1).flatten(1, 3)[:, :tokens] for cells in unpack_regions(regions))


def region_view(cache: torch.Tensor) -> torch.Tensor:
    """View a cache as uint8 ``[num_blocks, num_kv_heads, block_size / 32, region_bytes]``; blocks may be padded.

    Raises
    ------
    TypeError, ValueError
        As `check_layout`.
    """
    check_layout(cache)
    size = REGION_TOKENS * cache.shape[3]
    return cache.as_strided(
        (cache.shape[0], cache.shape[1], cache.shape[2] // REGION_TOKENS, size),
        (cache.stride(0), cache.stride(1), size, 1),
        cache.storage_offset(),
    )


def check_layout(cache: torch.Tensor) -> None:
    """Check that a tensor can be a paged 4-bit cache.

    Raises
    ------
    TypeError
        ``cache`` is no uint8 tensor.
    ValueError
        Its shape or strides are not those of a paged 4-bit cache.
    """
    if not isinstance(cache, torch.Tensor) or cache.dtype != torch.uint8:
        kind = cache.dtype if isinstance(cache, torch.Tensor) else type(cache).__name__
        raise TypeError(f"cache is a {kind}; accepted: a torch.uint8 tensor")
    shape, strides = cache.shape, cache.stride()
    accepted = "accepted: [num_blocks, num_kv_heads, block_size, head_dim + 8] with head_dim 64, 128 or 256"
    if len(shape) != 4 or shape[3] - METADATA_BYTES not in HEAD_DIMS:
        raise ValueError(f"cache has shape {list(shape)}; {accepted}")
    if 0 in shape[:2]:
        raise ValueError(f"cache has shape {list(shape)}; accepted: at least one block and one KV head")
    if shape[2] == 0 or shape[2] % REGION_TOKENS:
        raise ValueError(f"cache has block_size {shape[2]}; accepted: a multiple of {REGION_TOKENS} tokens")
    if strides[3] != 1 or strides[2] != shape[3]:
        raise ValueError(f"cache has strides {strides}; accepted: each (block, head) dense")
    apart = [stride for stride, size in zip(strides, shape[:2], strict=False) if size > 1]
    if any(stride % 16 or stride < shape[2] * shape[3] for stride in apart):
        raise ValueError(f"cache has strides {strides}; accepted: blocks and heads apart, at multiples of 16 bytes")


# In the regions, byte i of a token's *row* holds dimensions 2i (low bits) and 2i + 1. Token T = 8j + 2t + e.


def _split(cells: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Codec bytes to rows ``[..., 32, head_dim / 2]``, and scale and offset ``[..., 32, 2]`` bytes each."""
    codes, scale, offset = cells.split([cells.shape[-1] - 4, 2, 2], dim=-1)
    numbers = torch.cat([codes & 15, codes >> 4], dim=-1)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4, (scale, offset)


def _codec_bytes(rows: torch.Tensor) -> torch.Tensor:
    low, high = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2).chunk(2, dim=-1)
    return low | high << 4


def _order_keys(rows: torch.Tensor) -> torch.Tensor:
    """``[..., 32, head_dim / 2]`` to byte (dim // 64)·1024 + 32·T + (dim % 64) // 2."""
    return rows.unflatten(-1, (-1, 32)).transpose(-3, -2).flatten(-3)


def _restore_keys(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    return flat.unflatten(-1, (head_dim // 64, REGION_TOKENS, 32)).transpose(-3, -2).flatten(-2)


def _order_values(rows: torch.Tensor) -> torch.Tensor:
    """``[..., 32, head_dim / 2]``, T = (j, t, e) and dim = (i, g, 4), to halfwords ordered (j, g, t, i, e)."""
    x = rows.unflatten(-1, (-1, 8, 2)).unflatten(-4, (4, 4, 2))  # j t e i g byte
    return x.movedim((-2, -4), (-5, -2)).flatten(-6)  # j g t i e byte


def _restore_values(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    x = flat.unflatten(-1, (4, 8, 4, head_dim // 32, 2, 2))  # j g t i e byte
    return x.movedim((-5, -2), (-2, -4)).flatten(-3).flatten(-4, -2)


def _order_metadata(numbers: torch.Tensor) -> torch.Tensor:
    """``[..., 32, 2]`` bytes, T = (j, t, e), to fp16 numbers ordered (t, j, e)."""
    return numbers.unflatten(-2, (4, 4, 2)).transpose(-4, -3).flatten(-4)


def _restore_metadata(flat: torch.Tensor) -> torch.Tensor:
    return flat.unflatten(-1, (4, 4, 2, 2)).transpose(-4, -3).flatten(-4, -2)
