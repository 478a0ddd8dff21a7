"""Restore: outputs of attention over mapped values, back to where the values came from."""

from __future__ import annotations

import torch

from kvlab.kernels.arguments import check_dense, check_tensor
from kvlab.kernels.backends import choose_backend
from kvlab.kernels.naive.restore import restore as naive_restore


def restore(output: torch.Tensor, inverse: torch.Tensor, mean: torch.Tensor, *, backend: str | None = None) -> None:
    """Map outputs back, in place: o · inverse + mean per head, summed in float32 and rounded once.

    The weights of an output o = Σ w v add up to 1, so that it comes back from an affine map of the values as a single
    value does.

    Parameters
    ----------
    output
        bfloat16 ``[tokens, num_heads, head_dim]``, contiguous, rows as vectors.
    inverse
        bfloat16 ``[num_kv_heads, head_dim, head_dim]``, contiguous; the query heads of a group use the matrix of their
        KV head.
    mean
        float32 ``[num_kv_heads, head_dim]``, contiguous.
    backend
        ``"triton"``, ``"naive"`` or None: see `kvlab.kernels.backends.choose_backend`. A CUDA kernel there is none.

    Raises
    ------
    TypeError, ValueError
        An argument does not have the dtype, shape, layout or device said here; the backend cannot run here, and why.
    """
    check_tensor(inverse, "inverse")
    if inverse.ndim != 3 or inverse.shape[1] != inverse.shape[2] or not inverse.numel():
        raise ValueError(
            f"inverse has shape {list(inverse.shape)}; accepted: [num_kv_heads, head_dim, head_dim], not empty"
        )
    check_tensor(output, "output")
    num_kv_heads, head_dim = inverse.shape[:2]
    if output.ndim != 3 or output.shape[1] % num_kv_heads or not output.shape[1]:
        raise ValueError(
            f"output has shape {list(output.shape)}; accepted: [tokens, a multiple of {num_kv_heads}, {head_dim}]"
        )
    check_dense(output, "output", (*output.shape[:2], head_dim), (torch.bfloat16,), output.device)
    check_dense(inverse, "inverse", inverse.shape, (torch.bfloat16,), output.device)
    check_dense(mean, "mean", (num_kv_heads, head_dim), (torch.float32,), output.device)
    name = choose_backend(backend, output.device, head_dim=head_dim, cuda_head_dims=())
    if len(output) == 0:
        return
    if name == "naive":
        output.copy_(naive_restore(output, inverse, mean))
    else:
        from kvlab.kernels.triton.restore import restore as launch

        launch(output, inverse, mean)
