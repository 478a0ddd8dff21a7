"""Hadamard rotations: an outlier in one channel spread evenly over all of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from kvlab.checks import check_vectors
from kvlab.transforms.base import Transform
from kvlab.transforms.butterfly import rotate
from kvlab.transforms.hadamard_matrix import factor_order, hadamard_matrix
from kvlab.transforms.parameters import check_integer, check_layers, of_layer

SIGN_TAG = "kvlab/randomized-hadamard/1"
SIGNS_PER_DIGEST = 256


def random_signs(dim: int, seed: int, layer: int = 0) -> torch.Tensor:
    """Signs s of a randomized Hadamard rotation, the same for any version of any library.

    Dimension i = 256 · b + j takes bit j of SHA-256 over the ASCII bytes of
    ``kvlab/randomized-hadamard/1:{seed}:{layer}:{b}``, the three numbers in decimal. Bit j is bit
    j mod 8, counted from the least significant, of the digest's byte j // 8; 0 is +1 and 1 is −1.

    Parameters
    ----------
    dim
        Number of signs.
    seed
        Integer ≥ 0.
    layer
        Absolute index of the decoder layer.

    Returns
    -------
    torch.Tensor
        float32 ``[dim]`` of ±1; a smaller ``dim`` gives the first of the same signs.

    Raises
    ------
    TypeError, ValueError
        An argument is no integer or too small.
    """
    dim = check_integer(dim, "dim", minimum=1)
    seed = check_integer(seed, "seed", minimum=0)
    return _hashed_signs(dim, seed, check_integer(layer, "layer", minimum=0)).clone()


@lru_cache(maxsize=256)
def _hashed_signs(dim: int, seed: int, layer: int) -> torch.Tensor:
    messages = (f"{SIGN_TAG}:{seed}:{layer}:{block}" for block in range(math.ceil(dim / SIGNS_PER_DIGEST)))
    digests = b"".join(hashlib.sha256(message.encode("ascii")).digest() for message in messages)
    bits = np.unpackbits(np.frombuffer(digests, dtype=np.uint8), bitorder="little")[:dim]
    return 1.0 - 2.0 * torch.from_numpy(bits).float()


def randomized_hadamard(dim: int, seed: int, layer: int = 0) -> torch.Tensor:
    """Randomized Hadamard rotation R = H · diag(s) / √dim, for x Rᵀ.

    Parameters
    ----------
    dim
        head_dim: an order that `hadamard_matrix` constructs.
    seed
        Integer ≥ 0, which with ``layer`` determines s (`random_signs`).
    layer
        Absolute index of the decoder layer.

    Returns
    -------
    torch.Tensor
        float32 ``[dim, dim]``, entries ±float32(1/√dim), orthogonal up to that rounding.

    Raises
    ------
    TypeError, ValueError
        An argument is no integer or too small, or there is no Hadamard matrix of order ``dim``.

    References
    ----------
    Ashkboos et al. 2024, arXiv:2404.00456 (QuaRot).
    """
    return hadamard_matrix(dim) * (random_signs(dim, seed, layer) * (1 / math.sqrt(dim)))


class Hadamard(Transform):
    """Rotation by H/√d: keys and queries alike, whose products an orthogonal map leaves alone.

    The products are fast Walsh–Hadamard butterflies with a fixed order of additions, so that the same
    keys give the same bits on any machine. `forward` returns a view whose tokens lie contiguous, the
    layout in which quantizers and `inverse` are fast.

    Parameters
    ----------
    block_size
        Order of the Hadamard matrices that repeat along head_dim, R = blockdiag(H, H, …)/√block_size,
        for a head_dim that has no Hadamard matrix of its own; None makes it head_dim.

    Raises
    ------
    TypeError, ValueError
        ``block_size`` is no order that `hadamard_matrix` constructs. All maps raise ValueError for a
        head_dim that is no such order, or with ``block_size`` no multiple of it.

    References
    ----------
    Ashkboos et al. 2024, arXiv:2404.00456 (QuaRot).
    """

    def __init__(self, block_size: int | None = None) -> None:
        if block_size is not None:
            factor_order(block_size, "block_size")
        self.block_size = block_size

    def signs(self, head_dim: int, layer: int = 0) -> torch.Tensor:
        """Signs s of ``layer``, here all +1: float32 ``[head_dim]``."""
        check_integer(layer, "layer", minimum=0)
        return torch.ones(head_dim, dtype=torch.float32, device="cpu")

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Rotate: x Rᵀ."""
        return self._rotate(x, layer, inverse=False)

    def inverse(self, y: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Rotate back: y R."""
        return self._rotate(y, layer, inverse=True)

    def query(self, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Rotate queries as keys, R being orthogonal."""
        return self.forward(q, layer)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where no rotation is constructed for ``head_dim``."""
        order = self.block_size or head_dim
        factor_order(order, "head_dim")
        if head_dim % order:
            raise ValueError(f"x has head_dim {head_dim}; accepted: a multiple of block_size, {order}")

    def _rotate(self, x: torch.Tensor, layer: int, *, inverse: bool) -> torch.Tensor:
        head_dim = check_vectors(x).shape[-1]
        self.check_head_dim(head_dim)
        order = self.block_size or head_dim
        core_order, power = factor_order(order)
        # The product with ±1 is exact, so sign and scale are one multiplication.
        factors = self.signs(head_dim, layer)[:, None].to(x.device) * (1 / math.sqrt(order))
        vectors = x.movedim(-1, 0).reshape(head_dim, -1).t()
        rotated = rotate(vectors.float(), factors, core_order, power, inverse=inverse)
        return rotated.t().view(head_dim, *x.shape[:-1]).movedim(0, -1)

    def __repr__(self) -> str:
        return f"Hadamard(block_size={self.block_size})"


class RandomizedHadamard(Hadamard):
    """Rotation by R = H · diag(s)/√d with random signs per channel and layer.

    Parameters
    ----------
    seed
        Integer ≥ 0, or a mapping from layer to one (calibrated seeds); see `random_signs`.
    block_size
        As in `Hadamard`; signs are still drawn per channel, so blocks differ.

    Raises
    ------
    TypeError, ValueError
        ``seed`` is no integer ≥ 0 or mapping from layers to such; ``block_size`` as in `Hadamard`. All
        maps raise ValueError for a layer that the mapping lacks.

    References
    ----------
    Ashkboos et al. 2024, arXiv:2404.00456 (QuaRot).

    Examples
    --------
    >>> rotation = RandomizedHadamard(seed=7)
    >>> rotated = rotation.forward(torch.randn(1000, 128), layer=4)
    """

    def __init__(self, seed: int | Mapping[int, int] = 0, block_size: int | None = None) -> None:
        super().__init__(block_size)
        if isinstance(seed, Mapping):
            layers = check_layers(seed, "seed")
            self.seed = {layer: check_integer(value, f"seed[{layer}]", minimum=0) for layer, value in layers.items()}
        else:
            self.seed = check_integer(seed, "seed", minimum=0)

    def signs(self, head_dim: int, layer: int = 0) -> torch.Tensor:
        """Signs s of ``layer``: float32 ``[head_dim]``."""
        return random_signs(head_dim, of_layer(self.seed, layer, "seed"), layer)

    def __repr__(self) -> str:
        return f"RandomizedHadamard(seed={self.seed}, block_size={self.block_size})"
