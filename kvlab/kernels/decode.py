"""Decode attention over the paged 4-bit cache: planned once a step, run once a layer."""

from __future__ import annotations

import ctypes
import math

import torch

from kvlab.checks import check_choice, check_integer, check_number
from kvlab.kernels import nvrtc
from kvlab.kernels.arguments import (
    check_alignment,
    check_block_table,
    check_cache,
    check_dense,
    check_heads,
    check_tensor,
    resolve_device,
)
from kvlab.kernels.backends import choose_backend
from kvlab.kernels.layout import HEAD_DIMS, REGION_TOKENS, region_bytes
from kvlab.kernels.naive.decode import decode_attention

MAX_Q_LEN = 8


class DecodePlan:
    """Workspace and schedule of decode attention, for all layers of a model.

    Everything has a fixed shape and address, nothing waits for the device: `update` and `attend` can be captured in a
    CUDA graph and replayed with other sequence lengths. Kernels are loaded when they are first launched, so call both
    once before a capture. A plan serves one stream at a time.

    Parameters
    ----------
    num_heads, num_kv_heads
        Query and KV heads of a layer on this device; query head h reads KV head h // (num_heads / num_kv_heads).
    head_dim
        128 for the CUDA kernels; 64, 128 or 256 for the others.
    block_size
        Tokens per block of the cache, a multiple of 32.
    max_batch
        Most sequences of a step.
    q_len
        New tokens of every sequence, 1 to 8: more than one to verify speculated tokens.
    device
        Where the cache is.
    backend
        See `kvlab.kernels.backends.choose_backend`.

    Raises
    ------
    TypeError, ValueError
        A number is none of those; num_heads is no multiple of num_kv_heads; the backend cannot run here, and why.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int = 128,
        block_size: int,
        max_batch: int,
        q_len: int = 1,
        device: torch.device | str = "cuda",
        backend: str | None = None,
    ):
        self.num_heads, self.num_kv_heads = check_heads(num_heads, num_kv_heads)
        self.head_dim, self.device = check_choice(head_dim, "head_dim", HEAD_DIMS), resolve_device(device)
        self.block_size = check_integer(block_size, "block_size", minimum=REGION_TOKENS)
        if self.block_size % REGION_TOKENS:
            raise ValueError(f"block_size is {block_size}; accepted: a multiple of {REGION_TOKENS} tokens")
        self.max_batch = check_integer(max_batch, "max_batch", minimum=1)
        self.q_len = check_choice(check_integer(q_len, "q_len", minimum=1), "q_len", range(1, MAX_Q_LEN + 1))
        self.backend = choose_backend(backend, self.device, head_dim=self.head_dim)
        self._planned = 0
        if self.backend == "cuda":
            self._kernels = _CudaDecode(self)
        elif self.backend == "triton":
            from kvlab.kernels.triton.decode import TritonDecode

            self._kernels = TritonDecode(
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.block_size,
                self.max_batch,
                self.q_len,
                device=self.device,
            )

    def update(self, seq_lens: torch.Tensor) -> None:
        """Plan a step, once for all its layers.

        Parameters
        ----------
        seq_lens
            int32 ``[batch]`` on the device, contiguous, the new tokens included; 0 is an empty sequence.

        Raises
        ------
        TypeError, ValueError
            ``seq_lens`` is no such tensor.
        """
        self._planned = self._check_batch(seq_lens)
        if self.backend == "cuda":
            self._kernels.plan(seq_lens)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        value_mean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with the new tokens of each sequence to its tokens up to each of them, in one layer.

        Parameters
        ----------
        q
            Rotated queries, bfloat16 ``[batch · q_len, num_heads, head_dim]``, contiguous, tokens in order.
        cache
            uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``, the new tokens stored.
        block_table
            int32 ``[batch, max_blocks]``, rows contiguous.
        seq_lens
            What `update` was given.
        scale
            Multiplies the scores; head_dim^-0.5 by default.
        out
            bfloat16 or float32, as ``q``; made if None.
        lse
            float32 ``[batch · q_len, num_heads]``, receives the natural log-sum-exp of the scores.
        value_mean
            float32 ``[num_kv_heads, head_dim]``, added to the output: what the scheme takes off values first.

        Returns
        -------
        torch.Tensor
            ``out``; zeros (and a log-sum-exp of −inf) where a sequence is empty.

        Raises
        ------
        TypeError, ValueError
            A tensor does not have the dtype, shape, layout or device said here, or `update` was not called for it.
        """
        batch = self._check_batch(seq_lens)
        if batch != self._planned:
            raise ValueError(f"seq_lens has {batch} sequences; accepted: {self._planned}, as update was given")
        rows = (batch * self.q_len, self.num_heads)
        check_dense(q, "q", (*rows, self.head_dim), (torch.bfloat16,), self.device)
        check_cache(cache, self.num_kv_heads, self.head_dim, self.device, block_size=self.block_size)
        check_block_table(block_table, self.device, batch=batch)
        out = torch.empty_like(q) if out is None else out
        check_dense(out, "out", tuple(q.shape), (torch.bfloat16, torch.float32), self.device)
        if lse is not None:
            check_dense(lse, "lse", rows, (torch.float32,), self.device)
        if value_mean is not None:
            check_dense(value_mean, "value_mean", (self.num_kv_heads, self.head_dim), (torch.float32,), self.device)
        for name, x in (("q", q), ("out", out), ("value_mean", value_mean)):
            if x is not None:
                check_alignment(x, name)
        scale = self.head_dim**-0.5 if scale is None else check_number(scale, "scale")
        if self.backend == "naive":
            result, result_lse = decode_attention(
                q, cache, block_table, seq_lens, scale=scale, q_len=self.q_len, value_mean=value_mean
            )
            out.copy_(result)
            if lse is not None:
                lse.copy_(result_lse)
        else:
            self._kernels.attend(q, cache, block_table, seq_lens, scale=scale, out=out, lse=lse, value_mean=value_mean)
        return out

    def _check_batch(self, seq_lens: torch.Tensor) -> int:
        check_tensor(seq_lens, "seq_lens")
        batch = seq_lens.shape[0] if seq_lens.ndim == 1 else 0
        if seq_lens.dtype != torch.int32 or not 1 <= batch <= self.max_batch or not seq_lens.is_contiguous():
            raise ValueError(
                f"seq_lens is {seq_lens.dtype} {list(seq_lens.shape)} with stride {seq_lens.stride()}; "
                f"accepted: torch.int32 [1 to {self.max_batch}], contiguous"
            )
        if seq_lens.device != self.device:
            raise ValueError(f"seq_lens is on {seq_lens.device}; accepted: {self.device}")
        return batch


class _OutputArgument(ctypes.Structure):
    """``struct Output`` of ``output.cuh``."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("value_mean", ctypes.c_void_p),
        ("is_float", ctypes.c_int),
    )

    def __init__(self, out: torch.Tensor, lse: torch.Tensor | None, value_mean: torch.Tensor | None):
        pointers = (0 if x is None else x.data_ptr() for x in (out, lse, value_mean))
        super().__init__(*pointers, out.dtype == torch.float32)


class _TablesArgument(ctypes.Structure):
    """``struct Tables`` of ``decode.cu``."""

    _fields_ = (("block_table", ctypes.c_void_p), ("stride", ctypes.c_int64), ("seq_lens", ctypes.c_void_p))

    def __init__(self, block_table: torch.Tensor, seq_lens: torch.Tensor):
        super().__init__(block_table.data_ptr(), block_table.stride(0), seq_lens.data_ptr())


class _CudaDecode:
    """The Hopper kernels: plan, decode, combine."""

    # Regions in flight per warp, and thread blocks per multiprocessor.
    stages, blocks_per_sm = 3, 2
    # As in schedule.cuh and query.cuh.
    warps, tile_rows, query_bytes = 4, 16, 5120
    threads = 32 * warps

    def __init__(self, plan: DecodePlan):
        defines = {
            "HEAD_DIM": plan.head_dim,
            "GROUP": plan.num_heads // plan.num_kv_heads,
            "Q_LEN": plan.q_len,
            "BLOCK_REGIONS": plan.block_size // REGION_TOKENS,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks_per_sm,
        }
        rows = defines["GROUP"] * plan.q_len
        self.row_blocks = -(-rows // self.tile_rows)
        block_rows = -(-rows // self.row_blocks)
        self.num_heads, self.num_kv_heads, self.q_len = plan.num_heads, plan.num_kv_heads, plan.q_len
        resident = torch.cuda.get_device_properties(plan.device).multi_processor_count * self.blocks_per_sm
        self.shares = resident // self.row_blocks
        self.shared_bytes = (
            self.warps * self.stages * (region_bytes(plan.head_dim) + 8)
            + self.warps * (block_rows * plan.head_dim * 4 + self.tile_rows * 8)
            + self.query_bytes
        )
        self._plan = nvrtc.Kernel("plan.cu", "plan", **defines)
        self._decode = nvrtc.Kernel("decode.cu", "decode", **defines)
        self._combine_rows = nvrtc.Kernel("combine.cu", "combine_rows", **defines)
        self._combine_parts = nvrtc.Kernel("combine.cu", "combine_parts", **defines)
        segments = plan.max_batch * plan.num_kv_heads

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=plan.device)

        self._before = empty(plan.max_batch + 1, dtype=torch.int32)
        # No regions: what no plan has filled is no work.
        self._share = torch.zeros(self.shares, 4, dtype=torch.int32, device=plan.device)
        self._splits = empty(segments, 2, dtype=torch.int32)
        partial_rows = (self.shares + segments) * self.row_blocks * block_rows
        self._partial = empty(partial_rows, plan.head_dim, dtype=torch.float32)
        self._partial_softmax = empty(partial_rows, 2, dtype=torch.float32)

    def plan(self, seq_lens: torch.Tensor) -> None:
        arguments = (self.num_kv_heads, self.shares, self._before, self._share, self._splits)
        self._plan((1,), 1024, seq_lens, len(seq_lens), *arguments)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        value_mean: torch.Tensor | None,
    ) -> None:
        partial = (self._partial, self._partial_softmax)
        output = _OutputArgument(out, lse, value_mean)
        self._decode(
            (self.shares * self.row_blocks,),
            self.threads,
            q,
            nvrtc.CacheArgument(cache),
            _TablesArgument(block_table, seq_lens),
            self._share,
            *partial,
            output,
            self.num_heads,
            self.num_kv_heads,
            scale * math.log2(math.e),
            shared_bytes=self.shared_bytes,
        )
        rows = len(q) * self.num_heads
        # A row among few has many splits, and four thread blocks share it.
        combine, threads, parts = (self._combine_parts, 256, 4) if rows <= 128 else (self._combine_rows, 128, 1)
        combine(
            (rows * parts,),
            threads,
            *partial,
            self._splits,
            output,
            self.num_heads,
            self.num_kv_heads,
            # It reads the plan before it waits for decode: decode itself has waited for the plan, as it never overlaps.
            overlap_previous=True,
        )
