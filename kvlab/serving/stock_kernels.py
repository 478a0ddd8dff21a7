"""Stock's kernels as entrants of the benchmark: what vLLM 0.29 runs, called as its attention backends call it.

Caches have vLLM's layout ``[num_blocks, num_kv_heads, block_size, key | value]`` with blocks of 16 tokens. Where a
choice helps stock it is given: the exact longest context as upper bound, FlashAttention's own number of splits (vLLM's
CUDA graphs fix 32 as most), and queries that are already quantized.
"""

from __future__ import annotations

from functools import partial

import torch

from kvlab.bench.cases import (
    HEAD_DIM,
    DecodeCase,
    Entry,
    StoreCase,
    fill_blocks,
    lengths,
    queries,
    relative_error,
    sets_of_inputs,
    shuffled_tables,
)
from kvlab.bench.ours import store_inputs
from kvlab.serving.flash import FLASH_ATTENTION

BLOCK_SIZE = 16
SCALE = HEAD_DIM**-0.5
INT4_CELL_BYTES = HEAD_DIM // 2 + 4
"""Per key or value: 4-bit codes and one float32 scale."""
SEGMENTS = 16
GRID_2D = 128
"""Of vLLM's Triton backend: softmax segments, and the thread blocks below which it splits the context into them."""


def flash_attention(case: DecodeCase, device: torch.device, dtype: torch.dtype) -> Entry:
    """Prepare FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) on a paged cache of ``dtype``.

    Once per step it computes its scheduler metadata. The error is that of the shortest sequence, in float64.

    Raises
    ------
    ImportError
        vLLM or its FlashAttention 3 is missing.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported

    if not is_fa_version_supported(FLASH_ATTENTION):
        raise ImportError("this vLLM has no FlashAttention 3 for this GPU")
    num_bytes = case.cache_bytes(2 * HEAD_DIM * dtype.itemsize)
    sets = sets_of_inputs(num_bytes)
    num_blocks, tables = shuffled_tables(case, BLOCK_SIZE, sets, device)
    shape = (case.num_kv_heads, BLOCK_SIZE, 2 * HEAD_DIM)
    block_bytes = case.num_kv_heads * BLOCK_SIZE * 2 * HEAD_DIM * dtype.itemsize

    def make(blocks: int) -> torch.Tensor:
        return torch.randn(blocks, *shape, dtype=torch.bfloat16, device=device).to(dtype)

    keys, values = fill_blocks(num_blocks, block_bytes, make).transpose(1, 2).split(HEAD_DIM, dim=-1)
    seq_lens = lengths(case, device)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len
    q = queries(case, sets, device)
    out = torch.empty_like(q)
    q = q.to(dtype)
    one = torch.ones(1, device=device).expand(case.batch, case.num_kv_heads)
    descale = {} if dtype.itemsize > 1 else {"q_descale": one, "k_descale": one, "v_descale": one}
    plan = partial(
        get_scheduler_metadata,
        batch_size=case.batch,
        max_seqlen_q=case.q_len,
        max_seqlen_k=case.context,
        num_heads_q=case.num_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=HEAD_DIM,
        cache_seqlens=seq_lens,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=BLOCK_SIZE,
        causal=True,
    )
    attend = partial(
        flash_attn_varlen_func,
        k=keys,
        v=values,
        cu_seqlens_q=starts,
        max_seqlen_q=case.q_len,
        seqused_k=seq_lens,
        max_seqlen_k=case.context,
        softmax_scale=SCALE,
        causal=True,
        scheduler_metadata=plan(),
        fa_version=FLASH_ATTENTION,
        **descale,
    )

    def error() -> float:
        row = case.seq_lens.index(min(case.seq_lens))
        length, at = case.seq_lens[row], slice(row * case.q_len, (row + 1) * case.q_len)
        got = attend(q=q[0], out=out[0].fill_(torch.nan), block_table=tables[0])[at]
        blocks = tables[0][row, : -(-length // BLOCK_SIZE)].long()
        exact_keys, exact_values = (x[blocks].flatten(0, 1)[:length].double() for x in (keys, values))
        return relative_error(got, causal_attention(q[0][at].double(), exact_keys, exact_values))

    calls = [partial(attend, q=a, out=b, block_table=table) for a, b, table in zip(q, out, tables, strict=True)]
    return Entry(calls, num_bytes, once_per_step=plan, error=error)


def int4_per_token_head(case: DecodeCase, device: torch.device) -> Entry:
    """Prepare vLLM's Triton kernel of ``--kv-cache-dtype int4_per_token_head``.

    Raises
    ------
    ImportError
        vLLM is missing.
    """
    from vllm.v1.attention.ops.int4_per_token_head import unified_attention_int4

    num_bytes = case.cache_bytes(2 * INT4_CELL_BYTES)
    sets = sets_of_inputs(num_bytes)
    num_blocks, tables = shuffled_tables(case, BLOCK_SIZE, sets, device)
    shape = (case.num_kv_heads, BLOCK_SIZE, 2, INT4_CELL_BYTES)

    def make(blocks: int) -> torch.Tensor:
        chunk = torch.randint(256, (blocks, *shape), dtype=torch.uint8, device=device)
        chunk.view(torch.float32)[..., -1].uniform_(0.05, 0.15)
        return chunk

    cache = fill_blocks(num_blocks, case.num_kv_heads * BLOCK_SIZE * 2 * INT4_CELL_BYTES, make).transpose(1, 2)
    scales = cache.view(torch.float32)[..., -1]
    q = queries(case, sets, device)
    out = torch.empty_like(q)
    threshold = GRID_2D // case.num_kv_heads
    partial_sums = torch.empty(threshold, case.num_heads, SEGMENTS, HEAD_DIM, device=device)
    attend = partial(
        unified_attention_int4,
        k_cache=cache[..., 0, :],
        v_cache=cache[..., 1, :],
        cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len,
        max_seqlen_q=case.q_len,
        seqused_k=lengths(case, device),
        max_seqlen_k=case.context,
        softmax_scale=SCALE,
        window_size=(-1, -1),
        softcap=0.0,
        sinks=None,
        alibi_slopes=None,
        use_alibi_sqrt=False,
        qq_bias=None,
        output_scale=None,
        mm_prefix_range=None,
        k_scale_cache=scales[..., 0],
        v_scale_cache=scales[..., 1],
        seq_threshold_3D=threshold,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=partial_sums,
        softmax_segm_max=torch.empty_like(partial_sums[..., 0]),
        softmax_segm_expsum=torch.empty_like(partial_sums[..., 0]),
    )
    calls = [partial(attend, q=a, out=b, block_table=table) for a, b, table in zip(q, out, tables, strict=True)]
    return Entry(calls, num_bytes)


def turboquant_4bit(case: DecodeCase, device: torch.device) -> Entry:
    """Prepare vLLM's Triton kernel of ``--kv-cache-dtype turboquant_4bit_nc`` (Zandieh et al. 2025, arXiv:2504.19874).

    Raises
    ------
    ImportError
        vLLM is missing.
    ValueError
        ``case.q_len`` is more than 1, which that kernel does not take.
    """
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

    if case.q_len > 1:
        raise ValueError(f"q_len is {case.q_len}; accepted: 1")
    config = TurboQuantConfig.from_cache_dtype("turboquant_4bit_nc", HEAD_DIM)
    cell_bytes = config.slot_size_aligned
    num_bytes = case.cache_bytes(cell_bytes)
    sets = sets_of_inputs(num_bytes)
    num_blocks, tables = shuffled_tables(case, BLOCK_SIZE, sets, device)

    def make(blocks: int) -> torch.Tensor:
        # Below 60 no two bytes make a NaN or an infinite norm in fp16.
        shape = (blocks, BLOCK_SIZE, case.num_kv_heads, cell_bytes)
        return torch.randint(60, shape, dtype=torch.uint8, device=device)

    cache = fill_blocks(num_blocks, BLOCK_SIZE * case.num_kv_heads * cell_bytes, make)
    rotation = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, device=device)).Q
    attend = partial(
        triton_turboquant_decode_attention,
        kv_cache=cache,
        seq_lens=lengths(case, device),
        Pi=rotation,
        centroids=get_centroids(HEAD_DIM, config.centroid_bits).to(device).float(),
        scale=SCALE,
        mse_bits=config.key_mse_bits,
        key_packed_size=config.key_packed_size,
        value_quant_bits=config.effective_value_quant_bits,
        key_fp8=config.key_fp8,
        norm_correction=config.norm_correction,
        PiT=rotation.T.contiguous(),
    )
    q = queries(case, sets, device)
    calls = [partial(attend, a, block_table=table) for a, table in zip(q, tables, strict=True)]
    return Entry(calls, num_bytes)


def norms_and_fp8_store(case: StoreCase, device: torch.device) -> Entry:
    """Prepare what stock runs between projection and attention: two QK-norms and the write to the FP8 cache.

    Raises
    ------
    ImportError
        vLLM is missing.
    """
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    num_bytes = case.moved_bytes(2 * HEAD_DIM)
    qkv, slots, num_blocks = store_inputs(case, num_bytes, BLOCK_SIZE, device)
    shape = (num_blocks, case.num_kv_heads, BLOCK_SIZE, 2 * HEAD_DIM)
    cache = torch.zeros(shape, dtype=torch.uint8, device=device)
    key_cache, value_cache = cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
    gain, one = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device=device), torch.ones(1, device=device)
    heads = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    q_out, k_out = (torch.empty(case.tokens, n, HEAD_DIM, dtype=torch.bfloat16, device=device) for n in heads[:2])

    def run(projection: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        q, k, v = projection.unflatten(-1, (-1, HEAD_DIM)).split(heads, dim=1)
        ops.rms_norm(q_out, q, gain, 1e-6)
        ops.rms_norm(k_out, k, gain, 1e-6)
        ops.reshape_and_cache_flash(k_out, v, key_cache, value_cache, slot_mapping, "fp8", one, one)

    return Entry([partial(run, *inputs) for inputs in zip(qkv, slots, strict=True)], num_bytes)


def paged_fp8_prefill(case: DecodeCase, device: torch.device) -> Entry:
    """Prepare FlashAttention 3 on the paged FP8 cache with new bfloat16 queries, which stock quantizes first.

    Raises
    ------
    ImportError
        vLLM or its FlashAttention 3 is missing.
    """
    step = flash_attention(case, device, torch.float8_e4m3fn)
    q = queries(case, 1, device)[0]
    attend = step.calls[0]
    return Entry([lambda: attend(q=q.to(torch.float8_e4m3fn))], None)


DECODE = {
    "fp8": partial(flash_attention, dtype=torch.float8_e4m3fn),
    "bf16": partial(flash_attention, dtype=torch.bfloat16),
    "int4-per-token-head": int4_per_token_head,
    "turboquant-4bit": turboquant_4bit,
}
"""Scheme → entrant of decode attention."""

STORE = {"fp8": norms_and_fp8_store}
"""Scheme → entrant of the store."""

PREFILL = {"fp8": paged_fp8_prefill}
"""Scheme → entrant of prefill."""


def causal_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with the last tokens of one sequence.

    Parameters
    ----------
    q
        ``[q_len, num_heads, head_dim]``.
    keys, values
        ``[tokens, num_kv_heads, head_dim]``.

    Returns
    -------
    torch.Tensor
        ``[q_len, num_heads, head_dim]``.
    """
    grouped = q.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,thd->qhgt", grouped, keys) * SCALE
    token = torch.arange(len(keys), device=q.device)
    last = len(keys) - len(q) + torch.arange(len(q), device=q.device)
    scores.masked_fill_((token > last[:, None])[:, None, None], -torch.inf)
    return torch.einsum("qhgt,thd->qhgd", scores.softmax(-1), values).flatten(1, 2)
