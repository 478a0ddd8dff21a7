"""Key error weighted by the query covariance: the error of the attention scores, in one trace per head."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvlab.calibrate.layers import folds
from kvlab.checks import check_vectors
from kvlab.quantizers.base import BLOCK_VECTORS, HEAP_BYTES
from kvlab.recording import LayerCapture
from kvlab.schemes import Scheme, StoredAs, get_scheme

CUDA_BLOCK_VECTORS = 1 << 18
"""Vectors handled at once on a GPU: at head_dim 128 a float32 block of 128 MB, so that launches cost nothing."""


def query_covariance(layer: LayerCapture, scheme: str | Scheme = "hadamard-int4") -> torch.Tensor:
    """Second moment C = E[q qᵀ] of the queries that read each KV head, as they meet the keys before R.

    Where ``scheme`` folds the gain, the key stored is n with k = g_k ⊙ n, and q · k = (g_k ⊙ q) · n: the
    query that meets it is g_k ⊙ q. The moment is about zero, since a query's mean acts on scores like the rest.

    Parameters
    ----------
    layer
        One layer of a capture; its sampled queries are averaged, over the batch too.
    scheme
        Decides whether the gain is folded.

    Returns
    -------
    torch.Tensor
        float32 ``[num_kv_heads, head_dim, head_dim]``, symmetric, summed in float64.
    """
    q = layer.q.double()
    if folds(get_scheme(scheme), layer):
        q = q * layer.k_gain
    batch, num_kv_heads, _, head_dim = layer.k.shape
    q = q.reshape(batch, num_kv_heads, -1, head_dim)
    return (q.mT @ q).sum(0).div_(batch * q.shape[2]).float()


class KeyObjective:
    """Relative score error of one layer's stored keys, made ready to be asked for many rotations.

    A stored key k̂ = k + e moves the score of a query q by q · e. Whatever all tokens of a sequence have in
    common of that moves every score of q equally, and softmax(s + c) = softmax(s): with ē the mean of e over
    the tokens, only q · (e − ē) reaches attention. Its mean square over queries and tokens is

        E[(e − ē)ᵀ C (e − ē)] = tr(C S_e),   S_e = E[e eᵀ] − ē ēᵀ,

    measured against that of the scores themselves, which matter by their differences too: tr(C S_k). So the
    objective √(tr(C S_e) / tr(C S_k)) ignores a constant added to all keys, but for what it does to rounding.
    Every token weighs the same, near or far, attended to or not: a proxy that ranks rotations at the cost of one
    roundtrip; the attention-output error decides among the best.

    By the definition of a transform, q · e = query(q) · (ŷ − y) with y what is quantized. So C goes to the
    transformed side once, and errors are never mapped back.

    Parameters
    ----------
    keys
        ``[..., num_kv_heads, tokens, head_dim]``, any float dtype: what the scheme stores, before its transforms.
        Leading dimensions are sequences, each with its own ē and k̄. At least two tokens.
    covariance
        ``[num_kv_heads, head_dim, head_dim]``, from `query_covariance`.

    Raises
    ------
    TypeError, ValueError
        Shapes do not fit, or some head's scores do not differ between tokens at all.
    """

    def __init__(self, keys: torch.Tensor, covariance: torch.Tensor) -> None:
        head_dim = check_vectors(keys, "keys", min_ndim=3).shape[-1]
        if covariance.shape != (keys.shape[-3], head_dim, head_dim):
            accepted = [keys.shape[-3], head_dim, head_dim]
            raise ValueError(f"covariance has shape {list(covariance.shape)}; accepted: {accepted}, as keys are")
        keys = keys.reshape(-1, *keys.shape[-3:])
        self.covariance = covariance.float()
        vectors = CUDA_BLOCK_VECTORS if keys.is_cuda else BLOCK_VECTORS
        step = max(1, vectors // (keys.shape[0] * keys.shape[1]))
        # Channels outermost, the layout in which rotations and quantizers are fast, once for all seeds.
        self.blocks = [block.movedim(-1, 0).float().contiguous().movedim(0, -1) for block in keys.split(step, dim=-2)]
        # A common shift changes no scatter, and keeps a large mean from costing digits.
        shift = self.blocks[0].mean(-2, keepdim=True)
        self.energy = self._weighted(_scatter(block - shift for block in self.blocks), self.covariance)
        if not (self.energy > 0).all():
            energies = ", ".join(f"{value:.3g}" for value in self.energy.tolist())
            raise ValueError(f"keys have a score variance per head of {energies}; accepted: positive finite ones")

    @torch.no_grad()
    def error(self, side: StoredAs, layer: int = 0) -> torch.Tensor:
        """Objective per KV head under ``side``, the key side of a scheme.

        Parameters
        ----------
        side
            Transforms and quantizer of the keys; the quantizer per token.
        layer
            Absolute decoder layer, for transforms that differ between layers.

        Returns
        -------
        torch.Tensor
            float64 ``[num_kv_heads]``, 0 for exact storage.

        Raises
        ------
        ValueError
            The quantizer shares something between tokens, or cannot hold these keys.
        """
        if not side.per_token:
            raise ValueError(f"side is {side!r}; accepted: a quantizer that stores each token by itself")
        query = side.transform.query
        covariance = query(query(self.covariance, layer).mT, layer)
        # Keeps glibc from returning every block's temporaries to the system, as in kvlab.quantizers.base.
        torch.empty(HEAP_BYTES, dtype=torch.uint8)
        scatter = _scatter(self._errors(side, layer))
        return (self._weighted(scatter, covariance) / self.energy).sqrt()

    def _errors(self, side: StoredAs, layer: int) -> Iterable[torch.Tensor]:
        for block in self.blocks:
            y = side.transform.forward(block, layer)
            yield side.quantizer.roundtrip_block(y) - y

    @staticmethod
    def _weighted(scatter: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
        """tr(C S) per head, added up over sequences."""
        return (covariance * scatter).sum((-2, -1)).sum(0)


def _scatter(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """Σ (x − x̄)(x − x̄)ᵀ over tokens: float32 products per block, added up in float64."""
    gram = total = tokens = 0
    for x in blocks:
        gram = gram + (x.mT @ x).double()
        total = total + x.sum(-2).double()
        tokens += x.shape[-2]
    return gram - total[..., :, None] * total[..., None, :] / tokens


def weighted_key_error(side: StoredAs, keys: torch.Tensor, covariance: torch.Tensor, layer: int = 0) -> torch.Tensor:
    """Relative error of the scores when ``keys`` are stored under ``side``; see `KeyObjective`.

    Returns
    -------
    torch.Tensor
        float64 ``[num_kv_heads]``.

    Raises
    ------
    TypeError, ValueError
        As `KeyObjective` and its ``error``.
    """
    return KeyObjective(keys, covariance).error(side, layer)
