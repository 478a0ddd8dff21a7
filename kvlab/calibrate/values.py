"""The values' side: a mean and a matrix per KV head, from what an error of a value does to the output."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvlab.calibrate.closed_forms import led_by_the_free_direction, shrunk
from kvlab.calibrate.compose import rotation_of
from kvlab.calibrate.fit import rotation_matrix
from kvlab.calibrate.layers import full_layers
from kvlab.calibrate.sample import attention_weights, mixed, moment
from kvlab.recording import Capture, LayerCapture
from kvlab.schemes import Scheme, get_scheme
from kvlab.transforms import Center, Chain, Matrix


def fit_value_transforms(captures: Capture | Iterable[Capture], scheme: str | Scheme = "hadamard-int4") -> Chain:
    """Find the values' mean and matrix for every full-attention layer and KV head.

    Parameters
    ----------
    captures
        One or more captures of one model.
    scheme
        Whose rotation is part of what is found.

    Returns
    -------
    Chain
        ``Center`` and ``Matrix``, for `fitted_scheme`.

    Raises
    ------
    TypeError, ValueError
        ``captures`` are none or do not fit together, the scheme has no rotation alone on its keys, or a head's values
        have no energy.
    """
    hadamard, means, matrices = rotation_of(get_scheme(scheme)), {}, {}
    for index, own in full_layers(captures).items():
        means[index], matrices[index] = fit_values(own, rotation_matrix(hadamard, index, own[0].v.shape[-1]))
    return Chain(Center(means), Matrix(matrices))


def fit_values(layers: Iterable[LayerCapture], rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find one layer's mean μ and matrix A for its values, stored as A (v − μ).

    An output is Σ w v, so an error of a value moves it by w times as much, in whatever direction: what is to be made
    small is tr(A⁻¹ A⁻ᵀ) · tr(Π A M Aᵀ), the README's with C = I. With M = U diag(λ) Uᵀ the least is reached by
    A = R diag(λ^−¼) Uᵀ, R turning the first direction to where the quantizer's offset takes it. It is not enlarged
    there, as that of keys is: outputs are rounded as they come back, and would be by as much more.

    Parameters
    ----------
    layers
        One layer of one or more captures of a model.
    rotation
        ``[head_dim, head_dim]``, orthogonal.

    Returns
    -------
    mean, matrix
        float32 ``[num_kv_heads, head_dim]`` and ``[num_kv_heads, head_dim, head_dim]``. Half of a token's weight is
        its share of Σ w² over the sampled queries, half is the same for all, as in `kvlab.calibrate.mixed_sample`.

    Raises
    ------
    ValueError
        A head's values have no energy.
    """
    parts = [
        (layer.v[item].float().cpu(), _squared_weights(layer, item).cpu())
        for layer in layers
        for item in range(len(layer.v))
    ]
    values, attended = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    alike = torch.full_like(attended, 1 / attended.shape[1])
    weights = mixed(attended / attended.sum(-1, keepdim=True), alike)
    mean = (weights[:, None] @ values.double()).float()
    variances, basis = torch.linalg.eigh(shrunk(moment(values - mean, weights)))
    scaled = variances.flip(-1).pow(-0.25)[..., None] * basis.flip(-1).mT
    return mean[:, 0], (led_by_the_free_direction(rotation) @ scaled).float()


def _squared_weights(layer: LayerCapture, item: int) -> torch.Tensor:
    """Sum w² per token over the sampled queries, float64 ``[num_kv_heads, tokens]``."""
    return sum(weights.square_().sum(1, dtype=torch.float64) for weights, _ in attention_weights(layer, item))
