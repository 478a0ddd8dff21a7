"""What no code of keys can go below: the rate–distortion function of Gaussian keys, as queries see their errors."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from kvlab.calibrate.closed_forms import balanced, plain
from kvlab.calibrate.compose import rotation_of
from kvlab.calibrate.fit import rotation_matrix
from kvlab.calibrate.layers import full_layers
from kvlab.calibrate.learned import expected_error
from kvlab.calibrate.sample import KeySample, mixed_sample
from kvlab.checks import check_number
from kvlab.recording import Capture
from kvlab.schemes import Scheme, get_scheme


def rate_distortion_error(sample: KeySample, bits: float) -> torch.Tensor:
    """Least relative score error of Gaussian keys with this second moment, at ``bits`` per number.

    Errors count as queries see them, tr(C E[δ δᵀ]), so keys are seen through C^½: λ are the eigenvalues of
    C^½ M C^½, and reverse water-filling gives each direction ½ log₂(λ/θ) bits, or none where λ < θ. The least error is
    Σ min(θ, λ), with θ such that the bits add up to ``bits`` · head_dim. In the unit of `expected_error`.

    Parameters
    ----------
    sample
        Its second moment is taken about zero: subtract the mean first where it is stored apart.
    bits
        More than 0.

    Returns
    -------
    torch.Tensor
        float64 ``[num_kv_heads]``. Keys that are not Gaussian may be coded with less, but not by a code that knows
        their second moments only.

    Raises
    ------
    TypeError, ValueError
        ``bits`` is no number above 0.

    References
    ----------
    Kolmogorov 1956, IRE Transactions on Information Theory 2; Cover & Thomas 2006, Elements of Information Theory,
    theorem 10.3.3.
    """
    if check_number(bits, "bits") <= 0:
        raise ValueError(f"bits is {bits}; accepted: more than 0")
    seen = seen_energies(sample)
    # With the n strongest directions coded, their logarithms less θ's add up to twice the bits.
    head_dim = seen.shape[-1]
    counts = torch.arange(1, head_dim + 1, dtype=torch.float64)
    levels = (seen.log2().cumsum(-1) - 2 * bits * head_dim) / counts
    # The right n is the last whose weakest direction is still above its level.
    coded = (seen.log2() > levels).sum(-1, keepdim=True).clamp_(min=1)
    theta = levels.gather(-1, coded - 1).exp2()
    return (torch.minimum(seen, theta).sum(-1) / seen.sum(-1)).sqrt()


def seen_energies(sample: KeySample) -> torch.Tensor:
    """Mean squares of the scores by direction: the eigenvalues of C^½ M C^½.

    Returns
    -------
    torch.Tensor
        float64 ``[num_kv_heads, head_dim]``, the largest first, adding up to the sample's score energy.
    """
    root = _square_root(sample.covariance)
    return torch.linalg.eigvalsh(root @ sample.moment @ root).clamp_(min=0).flip(-1)


def _square_root(covariance: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.mT


def bound_table(captures: Capture | Iterable[Capture], scheme: str | Scheme = "hadamard-int4") -> pd.DataFrame:
    """Put the expected score errors of a rotation and of the best map beside the bound, at the scheme's bits.

    Parameters
    ----------
    captures
        One or more captures of one model.
    scheme
        Its keys have a rotation alone and 4-bit codes with an offset.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, and relative score errors in one unit: ``rotation`` (as the scheme has it), ``balanced``
        (with means) and ``bound`` (`rate_distortion_error` of the keys about their mean), by `mixed_sample`.

    Raises
    ------
    TypeError, ValueError
        As `fit_transforms`.
    """
    scheme = get_scheme(scheme)
    rows = []
    for layer, own in full_layers(captures).items():
        sample = mixed_sample(own, scheme)
        centred = sample.minus(sample.mean)
        rotation = rotation_matrix(rotation_of(scheme), layer, sample.keys.shape[-1])
        # All in the energy of scores that are not centred.
        share = (centred.score_energy / sample.score_energy).sqrt()
        errors = {
            "rotation": expected_error(sample, plain(sample, rotation)),
            "balanced": share * expected_error(centred, balanced(centred, rotation)),
            "bound": share * rate_distortion_error(centred, scheme.keys.bits_per_number(sample.keys.shape[-1])),
        }
        columns = zip(*(error.tolist() for error in errors.values()), strict=True)
        rows += [(layer, head, *row) for head, row in enumerate(columns)]
    return pd.DataFrame(rows, columns=["layer", "head", *errors])


def spectrum_table(captures: Capture | Iterable[Capture], scheme: str | Scheme = "hadamard-int4") -> pd.DataFrame:
    """List what queries see of the keys about their mean, direction by direction.

    Parameters
    ----------
    captures
        One or more captures of one model.
    scheme
        Decides whether the keys are those before their gain.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``direction`` (from 1 on, the strongest first) and ``share`` of the scores' energy, by
        `mixed_sample` and `seen_energies`; a head's shares add up to 1.

    Raises
    ------
    TypeError, ValueError
        ``captures`` are none or do not fit together, or a layer's queries or keys have no energy.
    """
    rows = []
    for layer, own in full_layers(captures).items():
        sample = mixed_sample(own, get_scheme(scheme))
        seen = seen_energies(sample.minus(sample.mean))
        shares = (seen / seen.sum(-1, keepdim=True)).tolist()
        rows += [
            (layer, head, direction, share) for head, row in enumerate(shares) for direction, share in enumerate(row, 1)
        ]
    return pd.DataFrame(rows, columns=["layer", "head", "direction", "share"])
