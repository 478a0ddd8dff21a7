"""Hadamard matrices, constructed: entries ±1, rows orthogonal."""

from __future__ import annotations

from functools import cache

import torch

from kvlab.transforms.parameters import check_integer

# Explicit, because a default device or dtype of the caller would otherwise stay in the cache.
_KIND = {"dtype": torch.float32, "device": "cpu"}


def hadamard_matrix(order: int) -> torch.Tensor:
    """Hadamard matrix H of ``order``: entries ±1, H Hᵀ = order · I.

    For a power of two it is Sylvester's, H[i, j] = (−1)^(number of ones in the binary i & j).
    Otherwise it is the Kronecker product core ⊗ Sylvester, with the smallest core, order / power of
    two, that Paley's constructions give: 80 = 20 · 4, 96 = 12 · 8, 28 = 28 · 1.

    Parameters
    ----------
    order
        1, 2, or a multiple of 4 for which a core exists.

    Returns
    -------
    torch.Tensor
        float32 ``[order, order]``.

    Raises
    ------
    TypeError
        ``order`` is no integer.
    ValueError
        ``order`` is below 1 or no construction here gives it.

    References
    ----------
    Paley 1933, "On orthogonal matrices", Journal of Mathematics and Physics 12.
    """
    core_order, power = factor_order(order)
    return torch.kron(hadamard_core(core_order), sylvester_matrix(power))


def factor_order(order: int, name: str = "order") -> tuple[int, int]:
    """Split ``order`` (called ``name`` in errors) into the smallest core there is and a power of two.

    Raises
    ------
    TypeError, ValueError
        As `hadamard_matrix`.
    """
    order = check_integer(order, name, minimum=1)
    power = order & -order
    while power and not _has_core(order // power):
        power //= 2
    if not power:
        raise ValueError(
            f"{name} is {order}, for which no Hadamard matrix is constructed here; accepted: powers of two "
            "times 1, p + 1 (prime p ≡ 3 mod 4: 12, 20, 44, …) or 2(p + 1) (prime p ≡ 1 mod 4: 28, 36, …); "
            "other head_dims take the block-diagonal form, RandomizedHadamard(block_size=…)"
        )
    return order // power, power


def sylvester_matrix(order: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two: float32 ``[order, order]``."""
    H = torch.ones(1, 1, **_KIND)
    while len(H) < order:
        H = torch.cat([torch.cat([H, H], dim=1), torch.cat([H, -H], dim=1)])
    return H


@cache
def hadamard_core(order: int) -> torch.Tensor:
    """Paley's Hadamard matrix of ``order`` (or the 1 × 1 one): float32 ``[order, order]``, cached: read only.

    With Q the matrix of quadratic residues modulo p, bordered to S = [[0, 1ᵀ], [±1, Q]]:
    S + I if p ≡ 3 mod 4 (Paley I), S ⊗ [[1, 1], [1, −1]] + I ⊗ [[1, −1], [−1, −1]] if p ≡ 1 (Paley II).
    """
    if order == 1:
        return torch.ones(1, 1, **_KIND)
    if _is_paley_prime(order - 1, residue=3):
        return _bordered_residues(order - 1, border=-1) + torch.eye(order, **_KIND)
    S = _bordered_residues(order // 2 - 1, border=1)
    S_part = torch.kron(S, torch.tensor([[1.0, 1.0], [1.0, -1.0]], **_KIND))
    return S_part + torch.kron(torch.eye(len(S), **_KIND), torch.tensor([[1.0, -1.0], [-1.0, -1.0]], **_KIND))


def _has_core(order: int) -> bool:
    paley_two = order % 2 == 0 and _is_paley_prime(order // 2 - 1, residue=1)
    return order == 1 or _is_paley_prime(order - 1, residue=3) or paley_two


@cache
def _is_paley_prime(p: int, *, residue: int) -> bool:
    return p % 4 == residue and p > 1 and all(p % divisor for divisor in range(3, int(p**0.5) + 1, 2))


def _bordered_residues(p: int, *, border: int) -> torch.Tensor:
    """Build S = [[0, 1ᵀ], [border, Q]], Q[a, b] = 1 if a − b is a square modulo p, −1 if not, 0 for a = b."""
    character = torch.full((p,), -1.0, **_KIND)
    character[[a * a % p for a in range(p)]] = 1.0
    character[0] = 0.0
    S = torch.ones(p + 1, p + 1, **_KIND)
    S[1:, 0] = border
    S[0, 0] = 0.0
    indices = torch.arange(p, device="cpu")
    S[1:, 1:] = character[(indices[:, None] - indices) % p]
    return S
