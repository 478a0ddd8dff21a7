"""What the kernels that map outputs back are tested on, in the interpreter and on the GPU."""

import pytest
import torch

from kvlab.kernels.naive.restore import restore as twin
from kvlab.kernels.restore import restore

# tokens, num_heads, num_kv_heads, head_dim: one row, rows of a program cut off, heads of one group in two programs.
shapes = pytest.mark.parametrize(
    "shape",
    [(1, 12, 1, 128), (3, 24, 2, 128), (11, 6, 2, 64), (5, 4, 4, 64), (70, 48, 4, 128), (2, 1, 1, 256)],
    ids=str,
)


def inputs(shape, device="cpu"):
    """Outputs inside a larger block of NaN, an inverse and a mean; the block too."""
    tokens, num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    block = torch.full((tokens + 2, num_heads, head_dim), torch.nan, dtype=torch.bfloat16)
    block[1:-1] = torch.randn(tokens, num_heads, head_dim, generator=generator)
    inverse = torch.randn(num_kv_heads, head_dim, head_dim, generator=generator) * head_dim**-0.5
    mean = torch.randn(num_kv_heads, head_dim, generator=generator)
    block = block.to(device)
    return block, block[1:-1], inverse.bfloat16().to(device), mean.to(device)


def check_near_twin(shape, backend, device="cpu"):
    """Every number is the twin's, rounded once, and nothing beside the outputs is touched."""
    block, output, inverse, mean = inputs(shape, device)
    expected = twin(output, inverse, mean)
    size = twin(output.abs(), inverse.abs(), mean.abs())
    restore(output, inverse, mean, backend=backend)
    # bfloat16 has 8 bits and rounds by half of the last; Triton's interpreter cuts off instead.
    rounding = 2**-7 if backend == "triton" and device == "cpu" else 2**-8
    # A float32 sum of so many numbers is off by at most as many of its own roundings.
    bound = expected.abs() * rounding + size * (shape[-1] + 1) * 2**-24 * (1 + rounding)
    assert ((output.double() - expected).abs() <= bound).all()
    assert block[[0, -1]].isnan().all()


def check_nan_stays_in_its_row(backend, device="cpu"):
    """A broken output of one token and head is that one's."""
    _, output, inverse, mean = inputs((9, 24, 2, 128), device)
    clean = output.clone()
    output[4, 13] = torch.nan
    for x in (output, clean):
        restore(x, inverse, mean, backend=backend)
    assert output[4, 13].isnan().all()
    output[4, 13] = clean[4, 13]
    assert torch.equal(output, clean)
