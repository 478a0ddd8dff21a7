"""From the scheme that was asked for to the matrices of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.calibrate import Calibration, calibrated_scheme
from kvlab.kernels.folding import Folding, check_key_quantizer, check_quantizer
from kvlab.kernels.restore import restore
from kvlab.quantizers import UnequalInteger
from kvlab.schemes import Scheme, get_scheme
from kvlab.serving.options import Options
from kvlab.transforms import FoldedQKNorm


def served_scheme(options: Options) -> Scheme:
    """Return the library's scheme that a server with these options stores.

    Raises
    ------
    ValueError
        The calibration file cannot be read, or has ingredients or a quantizer that are not served.
    """
    if options.kv_cache == "calibrated":
        scheme = Calibration.load(options.calibration).scheme()
        check_key_quantizer(scheme.keys.quantizer, f"{options.calibration}: the quantizer of keys")
        check_quantizer(scheme.values.quantizer, f"{options.calibration}: the quantizer of values")
        return scheme
    if options.rotation_seed is not None:
        return calibrated_scheme(options.kv_cache, options.rotation_seed, name=options.kv_cache)
    return get_scheme(options.kv_cache)


@dataclass(frozen=True, eq=False)
class ValueMap:
    """What a layer's values meet before they are stored, and its outputs afterwards.

    Attributes
    ----------
    matrix, bias
        A and −A μ, float32 ``[num_kv_heads, head_dim, head_dim]`` and ``[num_kv_heads, head_dim]``.
    inverse, mean
        A⁻ᵀ and μ, bfloat16 ``[num_kv_heads, head_dim, head_dim]`` and float32 ``[num_kv_heads, head_dim]``: rounding
        the matrix costs an output about what rounding itself does.
    """

    matrix: torch.Tensor
    bias: torch.Tensor
    inverse: torch.Tensor
    mean: torch.Tensor

    def restore(self, output: torch.Tensor) -> None:
        """Map bfloat16 ``[tokens, num_heads, head_dim]`` back, in place."""
        restore(output, self.inverse, self.mean)


def value_map(
    scheme: Scheme, layer: int, heads: list[int], *, num_kv_heads: int, head_dim: int, device: torch.device
) -> ValueMap | None:
    """Return what a scheme does to the values of a layer, or None where it stores them as they are.

    Parameters
    ----------
    scheme, layer, heads
        As in `layer_folding`.
    num_kv_heads, head_dim
        Of the layer, all ranks together.
    device
        Of the result.
    """
    transform = scheme.values.transform
    if not transform.transforms:
        return None
    # Affine maps show themselves on zero and on the unit vectors, the rows.
    probes = torch.cat([torch.zeros(1, head_dim), torch.eye(head_dim)]).expand(num_kv_heads, -1, -1)
    there, back = (each(probes, layer)[heads] for each in (transform.forward, transform.inverse))
    (bias, matrix), (mean, inverse) = (each.split([1, head_dim], dim=1) for each in (there, back))
    return ValueMap(
        (matrix - bias).mT.contiguous().to(device),
        bias[:, 0].contiguous().to(device),
        (inverse - mean).bfloat16().contiguous().to(device),
        mean[:, 0].float().contiguous().to(device),
    )


def layer_folding(
    scheme: Scheme,
    layer: int,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    heads: list[int],
    values: ValueMap | None = None,
) -> Folding:
    """Fold a scheme and the gains of QK-norm into the matrices of a layer without RoPE, beside its quantizers.

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
    values
        Of the same scheme, layer and heads.

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
    if isinstance(unequal := scheme.keys.quantizer, UnequalInteger):
        placement, expansion = (each(k_matrix.shape[-1]) for each in (unequal.placement, unequal.expansion))
        q_matrix, k_matrix, k_bias = expansion.mT @ q_matrix, placement @ k_matrix, k_bias @ placement.mT
    return Folding(
        _of_heads(q_matrix, heads, dims=2).to(device),
        _of_heads(k_matrix, heads, dims=2).to(device),
        v_matrix=None if values is None else values.matrix,
        v_bias=None if values is None else values.bias,
        k_bias=_of_heads(k_bias, heads, dims=1).expand(len(heads), -1).contiguous().to(device)
        if k_bias.any()
        else None,
        k_quantizer=scheme.keys.quantizer,
        v_quantizer=scheme.values.quantizer,
    )


def _of_heads(x: torch.Tensor, heads: list[int], *, dims: int) -> torch.Tensor:
    """Return the rank's heads of a parameter, or with one for all of them that one."""
    return x[None] if x.ndim == dims else x[heads]
