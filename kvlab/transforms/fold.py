"""QK-norm folding: the gains and the transform as fixed matrices for the query and for the key."""

from __future__ import annotations

import torch

from kvlab.checks import check_finite, check_vectors
from kvlab.transforms.base import Chain, Transform

PROBE = 2.0**24


class FoldedQKNorm:
    """What a transform and the gains of QK-norm come to on normalised keys and queries.

    With n_k = n(W_k x) and n_q = n(W_q x) before their gains, on layers without RoPE::

        cached key     K n_k + b       K = key_matrix, b = key_bias: the transform, no gain
        rotated query  Q n_q           Q = query_matrix: both gains, then the transform's query side

    (Q n_q) · (K n_k + b) = (g_q ⊙ n_q) · (g_k ⊙ n_k) + one constant per query, which softmax ignores.
    No gain is divided by, so zero components are fine.

    Parameters
    ----------
    transform
        Any transform, or `Chain`, whose forward is linear plus a constant.
    q_gain, k_gain
        Effective gains ``[head_dim]`` (1 + w where the checkpoint stores w), any float dtype, finite.

    Raises
    ------
    TypeError, ValueError
        ``transform`` is no `Transform`, or the gains are no finite float vectors of one head_dim.
    """

    def __init__(self, transform: Transform, q_gain: torch.Tensor, k_gain: torch.Tensor) -> None:
        if not isinstance(transform, Transform):
            raise TypeError(f"transform is a {type(transform).__name__}; accepted: a kvlab transform")
        for name, gain in (("q_gain", q_gain), ("k_gain", k_gain)):
            if check_vectors(gain, name).ndim > 1:
                raise ValueError(f"{name} has shape {list(gain.shape)}; accepted: [head_dim]")
            check_finite(gain, name)
        check_vectors(k_gain, "k_gain", head_dim=len(q_gain))
        self.transform = transform
        self.gain = q_gain.float() * k_gain.float()

    def key_matrix(self, layer: int = 0) -> torch.Tensor:
        """Linear part K of the cached key, K n (rows as vectors: n @ K.T).

        Returns
        -------
        torch.Tensor
            float32 ``[head_dim, head_dim]``, ``[num_kv_heads, head_dim, head_dim]`` where the transform
            of ``layer`` is per head.

        Raises
        ------
        ValueError
            The transform is not defined for this head_dim or ``layer``, or its parts have different
            numbers of heads.
        """
        # Unit vectors this long, exactly scaled, keep the subtraction of the constant from costing digits.
        probes = PROBE * self._unit_vectors(layer)
        linear = self.transform.forward(probes, layer) - self.key_bias(layer)[..., None, :]
        return (linear / PROBE).mT.contiguous()

    def key_bias(self, layer: int = 0) -> torch.Tensor:
        """Constant part b of the cached key, K n + b: float32 ``[head_dim]`` or ``[num_kv_heads, head_dim]``.

        Raises
        ------
        ValueError
            As `key_matrix`.
        """
        zeros = torch.zeros_like(self._unit_vectors(layer)[..., :1, :])
        return self.transform.forward(zeros, layer)[..., 0, :].contiguous()

    def query_matrix(self, layer: int = 0) -> torch.Tensor:
        """Matrix Q of the rotated query, Q n (rows as vectors: n @ Q.T), both gains in it.

        Returns
        -------
        torch.Tensor
            float32, shaped as `key_matrix`; query head h takes that of the KV head which it reads.

        Raises
        ------
        ValueError
            As `key_matrix`.
        """
        return (self.transform.query(self._unit_vectors(layer), layer).mT * self.gain).contiguous()

    def _unit_vectors(self, layer: int) -> torch.Tensor:
        unit_vectors = torch.eye(len(self.gain), dtype=torch.float32, device=self.gain.device)
        heads = _head_counts(self.transform, layer)
        if len(heads) > 1:
            raise ValueError(f"transform has parts for {sorted(heads)} KV heads; accepted: one number for all parts")
        return unit_vectors.expand(*heads, -1, -1)


def _head_counts(transform: Transform, layer: int) -> set[int]:
    """Collect the numbers of KV heads that the parts of ``transform`` tell apart."""
    if isinstance(transform, Chain):
        return set().union(*(_head_counts(part, layer) for part in transform.transforms))
    num_kv_heads = getattr(transform, "num_kv_heads", lambda layer: None)(layer)
    return set() if num_kv_heads is None else {num_kv_heads}
