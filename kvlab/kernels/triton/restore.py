"""Outputs over mapped values back to where values came from: one launch, every row read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32
"""Outputs of one program: those of 64 sessions of Kolibri-1 on one GPU are 96 programs, which an H200 runs at once."""

_DEPTH = 64
"""Dimensions multiplied at once: 64 rows of a 256 x 256 matrix are 64 KB of TF32."""


def restore(output: torch.Tensor, inverse: torch.Tensor, mean: torch.Tensor) -> None:
    """Launch the kernel on arguments that `kvlab.kernels.restore.restore` has checked; shapes as there."""
    tokens, num_heads, head_dim = output.shape
    group = num_heads // len(inverse)
    _kernel[(triton.cdiv(tokens * group, _ROWS), len(inverse))](
        output,
        tokens * group,
        inverse,
        mean,
        GROUP=group,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROWS=_ROWS,
        DEPTH=_DEPTH,
    )


# Another compilation for numbers of rows that 16 divides would stop a server that meets the first of them.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    output,
    num_rows,
    inverse,
    mean,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    vector = output + (token.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM
    exists = (row < num_rows)[:, None]
    restored = tl.zeros((ROWS, HEAD_DIM), tl.float32) + tl.load(mean + kv_head * HEAD_DIM + dim)
    for start in tl.static_range(0, HEAD_DIM, DEPTH):
        some = start + tl.arange(0, DEPTH)
        x = tl.load(vector + some, mask=exists, other=0.0).to(tl.float32)
        matrix = tl.load(inverse + (kv_head * HEAD_DIM + some)[:, None] * HEAD_DIM + dim).to(tl.float32)
        # What was bfloat16 is exact in TF32.
        restored = tl.dot(x, matrix, restored, input_precision="tf32")
    # In place: no warp writes before all have read.
    tl.debug_barrier()
    tl.store(vector + dim, restored.to(tl.bfloat16), mask=exists)
