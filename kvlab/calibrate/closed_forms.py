"""Key maps in closed form, from two second moments; the README of this folder derives them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvlab.calibrate.sample import KeySample

Finder = Callable[[KeySample, torch.Tensor], torch.Tensor]
"""From a sample and an orthogonal ``[head_dim, head_dim]`` to A, float64 ``[num_kv_heads, head_dim, head_dim]``."""

SHRINKAGE = 1e-3
"""Share of the mean eigenvalue added to each: no direction is trusted to be empty because a sample left it so. It
keeps the condition number of `balanced` below √(head_dim / SHRINKAGE) · FREE_FACTOR: 2,900 at 128, 4,050 at 256."""

FREE_FACTOR = 8.0
"""How much more the free direction is enlarged: its share of the error falls to 1/64, and the offset, some ten times
the range at most, still has 2⁻¹¹ · 10 · 15 < a tenth of a step of fp16 rounding."""


def plain(sample: KeySample, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate only: A = R for every head."""
    return rotation.double().expand(len(sample.keys), -1, -1)


def query_basis(sample: KeySample, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the queries' eigenbasis: A = R Uᵀ with C = U diag(c) Uᵀ, c decreasing.

    Range and noise are those of any rotation but for one thing: the leading eigenvector becomes the direction that
    the quantizer's offset takes (README), so whatever the keys have along it widens no range.

    References
    ----------
    OSCAR 2026, arXiv:2605.17757 (rotations from the query covariance, followed by a Hadamard matrix).
    """
    return led_by_the_free_direction(rotation) @ _query_eigenvectors(sample).mT


def channel_scales(sample: KeySample, rotation: torch.Tensor) -> torch.Tensor:
    """Scale channels, then rotate: A = R diag(λ), λ = (C_ii / M_ii)^¼, the best diagonal map.

    References
    ----------
    Xiao et al. 2022, arXiv:2211.10438 (SmoothQuant: scales exchanged between two factors).
    """
    return rotation.double() * _best_scales(shrunk(sample.covariance), shrunk(sample.moment))[:, None]


def scaled_query_basis(sample: KeySample, rotation: torch.Tensor) -> torch.Tensor:
    """Scale in the queries' eigenbasis: A = R diag(λ) Uᵀ, λ = (c_i / (Uᵀ M U)_ii)^¼."""
    basis = _query_eigenvectors(sample)
    scales = _best_scales(*(basis.mT @ shrunk(moment) @ basis for moment in (sample.covariance, sample.moment)))
    return led_by_the_free_direction(rotation) @ (scales[..., None] * basis.mT)


def balanced(sample: KeySample, rotation: torch.Tensor) -> torch.Tensor:
    """Map by the best linear map: A = R B with B M Bᵀ = B⁻ᵀ C B⁻¹ = diag(σ), its first direction free.

    For quantizers with an offset per vector: without one that direction, enlarged, widens the range instead.

    σ are the singular values of C^½ M^½. Where keys vary and queries look equally much, no direction can be given
    finer steps without costing another more. The direction of the largest σ goes where the offset takes it, and is
    enlarged there until next to nothing of its noise is left.

    References
    ----------
    Laub, Heath, Paige & Ward 1987, IEEE Transactions on Automatic Control 32 (balancing from two Cholesky factors).
    """
    balancing, _ = balance(sample)
    balancing[:, 0] *= FREE_FACTOR
    return led_by_the_free_direction(rotation) @ balancing


def balance(sample: KeySample) -> tuple[torch.Tensor, torch.Tensor]:
    """Find B with B M Bᵀ = B⁻ᵀ C B⁻¹ = diag(σ), float64 ``[num_kv_heads, head_dim, head_dim]``, and σ, decreasing."""
    queries, keys = (torch.linalg.cholesky(shrunk(moment)) for moment in (sample.covariance, sample.moment))
    left, sigma, _ = torch.linalg.svd(queries.mT @ keys)
    return sigma.rsqrt()[..., None] * (queries @ left).mT, sigma


def _query_eigenvectors(sample: KeySample) -> torch.Tensor:
    """U, columns by decreasing eigenvalue."""
    return torch.linalg.eigh(sample.covariance).eigenvectors.flip(-1)


def _best_scales(covariance: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    return (covariance.diagonal(dim1=-2, dim2=-1) / moment.diagonal(dim1=-2, dim2=-1)) ** 0.25


def led_by_the_free_direction(rotation: torch.Tensor) -> torch.Tensor:
    """R W with W the reflection that makes R W e₀ = 1/√d, the vector that an offset takes."""
    rotation = rotation.double()
    free = rotation.mean(0) * len(rotation) ** 0.5
    across = torch.eye(len(rotation), dtype=torch.float64)[0] - free
    # Below that the two agree up to the rotation's rounding to float32, and the reflection is the identity.
    if across.square().sum() < 2.0**-40:
        return rotation
    return rotation - 2 * torch.outer(rotation @ across, across) / across.square().sum()


def shrunk(moment: torch.Tensor) -> torch.Tensor:
    """Add `SHRINKAGE` of its mean eigenvalue to every eigenvalue of a second moment, per KV head.

    Raises
    ------
    ValueError
        A head has no energy.
    """
    head_dim = moment.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    if not (mean > 0).all():
        shown = ", ".join(f"{value:.3g}" for value in mean.tolist())
        raise ValueError(f"sample has a mean energy per channel of {shown} per KV head; accepted: positive ones")
    return moment + SHRINKAGE * mean[:, None, None] * torch.eye(head_dim, dtype=moment.dtype)


FINDERS: dict[str, Finder] = {
    finder.__name__: finder for finder in (balanced, scaled_query_basis, channel_scales, query_basis)
}
"""Those that `kvlab.calibrate.calibrate` takes by name, the best first."""
