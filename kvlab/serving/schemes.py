"""From the scheme that was asked for to the matrices of one layer."""

from __future__ import annotations

import torch

from kvlab.calibrate import Calibration, calibrated_scheme
from kvlab.kernels.folding import Folding
from kvlab.schemes import Scheme, get_scheme
from kvlab.serving.options import Options
from kvlab.transforms import FoldedQKNorm


def served_scheme(options: Options) -> Scheme:
    """Return the library's scheme that a server with these options stores.

    Raises
    ------
    ValueError
        The calibration file cannot be read, or has ingredients that are not served.
    """
    if options.kv_cache == "calibrated":
        return Calibration.load(options.calibration).scheme()
    if options.rotation_seed is not None:
        return calibrated_scheme(options.kv_cache, options.rotation_seed, name=options.kv_cache)
    return get_scheme(options.kv_cache)


def layer_folding(scheme: Scheme, layer: int, q_gain: torch.Tensor, k_gain: torch.Tensor, heads: list[int]) -> Folding:
    """Fold a scheme and the gains of QK-norm into the matrices of a layer without RoPE.

    Parameters
    ----------
    scheme
        What is stored.
    layer
        Absolute index of the decoder layer.
    q_gain, k_gain
        ``[head_dim]``.
    heads
        The KV heads of this rank, among all of the layer's.

    Returns
    -------
    Folding
        On the gains' device.
    """
    device = q_gain.device
    # On the host: a transform is the same bytes there, whatever the server's default device and dtype are.
    q_gain, k_gain = q_gain.detach().float().cpu(), k_gain.detach().float().cpu()
    ones = torch.ones_like(q_gain)
    folded = FoldedQKNorm(scheme.keys.transform, *((q_gain, k_gain) if scheme.fold_gain else (ones, ones)))
    q_matrix, k_matrix, k_bias = folded.query_matrix(layer), folded.key_matrix(layer), folded.key_bias(layer)
    if not scheme.fold_gain:
        q_matrix, k_matrix = q_matrix * q_gain, k_matrix * k_gain
    return Folding(
        _of_heads(q_matrix, heads, dims=2).to(device),
        _of_heads(k_matrix, heads, dims=2).to(device),
        k_bias=_of_heads(k_bias, heads, dims=1).expand(len(heads), -1).contiguous().to(device)
        if k_bias.any()
        else None,
    )


def _of_heads(x: torch.Tensor, heads: list[int], *, dims: int) -> torch.Tensor:
    """Return the rank's heads of a parameter, or with one for all of them that one."""
    return x[None] if x.ndim == dims else x[heads]
