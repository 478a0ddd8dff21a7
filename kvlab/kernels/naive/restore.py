"""Outputs over mapped values back to where values came from, in plain torch."""

from __future__ import annotations

import torch


def restore(output: torch.Tensor, inverse: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return what `kvlab.kernels.restore.restore` rounds, float64; shapes as there."""
    grouped = output.double().unflatten(1, (len(inverse), -1))
    return (grouped @ inverse.double() + mean.double()[:, None]).flatten(1, 2)
