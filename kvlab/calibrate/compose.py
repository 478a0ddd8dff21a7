"""A calibrated scheme: a registered one with rotations, or matrices, of its own and, optionally, centred keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvlab.calibrate.unequal import UnequalMatrix
from kvlab.checks import check_integer
from kvlab.quantizers import AsymmetricInteger, RefitInteger, RefitUnequalInteger, UnequalInteger
from kvlab.schemes import Scheme, StoredAs, get_scheme
from kvlab.transforms import Center, Chain, Matrix, RandomizedHadamard

_UNEQUAL = {AsymmetricInteger(4): UnequalInteger, RefitInteger(): RefitUnequalInteger}
"""Quantizer for equal bits → what stores unequal ones in its manner."""


def calibrated_scheme(
    base: str | Scheme,
    seeds: int | Mapping[int, int],
    means: Mapping[int, torch.Tensor] | None = None,
    maps: Mapping[int, torch.Tensor] | None = None,
    *,
    value_means: Mapping[int, torch.Tensor] | None = None,
    value_maps: Mapping[int, torch.Tensor] | None = None,
    fine: int = 0,
    name: str = "calibrated",
) -> Scheme:
    """Store keys as A·(x − μ): means μ and matrix A per layer, a rotation by its seed, all else as ``base`` has it.

    Values likewise where they have means or maps of their own.

    Parameters
    ----------
    base
        A scheme whose keys are rotated by a `RandomizedHadamard` and nothing else, such as "hadamard-int4".
    seeds
        One seed for every layer, or one per layer.
    means
        Per layer μ, ``[num_kv_heads, head_dim]`` (of keys before their gain where ``base`` folds it); None
        centres nothing.
    maps
        Per layer A, ``[num_kv_heads, head_dim, head_dim]``, in the place of the rotations, whose seeds then say only
        what they were made from; None rotates.
    fine
        Channels of the keys that ``maps`` map with eight bits, and with none, as in `kvlab.quantizers.UnequalInteger`;
        0 leaves the quantizer of ``base``; of one that searches scale and offset it is `RefitUnequalInteger`.
    name
        Of the new scheme, which is not registered.

    Returns
    -------
    Scheme
        Keys centred, rotated or mapped, quantized; all else as in ``base``.

    Raises
    ------
    TypeError, ValueError
        ``base`` is unknown, has other transforms on its keys or any on values that are to be mapped; ``seeds``, means,
        maps or ``fine`` are not as described.
    """
    rotation = rotation_of(get_scheme(base))
    if check_integer(fine, "fine", minimum=0) and maps is None:
        raise ValueError(f"fine is {fine} without maps; accepted: both, or 0")
    centring = [] if means is None else [Center(means)]
    if maps is None:
        mapping = RandomizedHadamard(seeds, rotation.block_size)
    else:
        mapping = UnequalMatrix(maps, fine, "maps") if fine else Matrix(maps, "maps")
    of_values = [] if value_means is None else [Center(value_means)]
    of_values += [] if value_maps is None else [Matrix(value_maps, "value_maps")]
    values = Chain(*of_values) if of_values else None
    return fitted_scheme(base, Chain(*centring, mapping), values=values, name=name)


def fitted_scheme(
    base: str | Scheme, transforms: Chain, *, values: Chain | None = None, name: str = "fitted"
) -> Scheme:
    """Return ``base`` with ``transforms``, from `fit_transforms`, in the place of its keys' rotation.

    With ``values``, from `fit_value_transforms`, its values are transformed too. Keys have unequal bits where
    `kvlab.calibrate.unequal` found their transforms.

    Raises
    ------
    TypeError, ValueError
        `check_base` refuses ``base``, or ``transforms`` or ``values`` are no `Chain`.
    """
    base = get_scheme(base)
    for argument, chain in {"transforms": transforms, "values": Chain() if values is None else values}.items():
        if not isinstance(chain, Chain):
            raise TypeError(f"{argument} is a {type(chain).__name__}; accepted: a kvlab.transforms.Chain")
    fine = next((each.fine for each in transforms.transforms if isinstance(each, UnequalMatrix)), 0)
    check_base(base, values=values is not None, fine=fine)
    quantizer = _UNEQUAL[base.keys.quantizer](fine) if fine else base.keys.quantizer
    sides = {"keys": StoredAs(*transforms.transforms, quantizer=quantizer)}
    if values is not None:
        sides["values"] = StoredAs(*values.transforms, quantizer=base.values.quantizer)
    return dataclasses.replace(base, name=name, **sides, source=f"{base.name}, calibrated")


def check_base(base: Scheme, *, values: bool, fine: int) -> None:
    """Check that a scheme's keys can be transformed, with ``fine`` channels, and its ``values`` where asked for.

    Raises
    ------
    ValueError
        ``base`` has other transforms than a rotation on its keys, or any on values that are to be transformed, or
        stores keys in another way than as `AsymmetricInteger` or `RefitInteger` where bits are to be unequal.
    """
    rotation_of(base)
    if fine and base.keys.quantizer not in _UNEQUAL:
        accepted = "one with plain 4-bit integers per token and head, as hadamard-int4 or hadamard-int4-refit"
        raise ValueError(f"base is {base.name!r}; accepted with fine channels: {accepted}")
    if values and base.values.transform.transforms:
        raise ValueError(f"base is {base.name!r}; accepted with transforms of values: one that has none")


def rotation_of(scheme: Scheme) -> RandomizedHadamard:
    """Return the one rotation of a scheme's keys, whose seed calibration may choose.

    Raises
    ------
    ValueError
        The keys have other transforms, or a quantizer that shares something between tokens.
    """
    match scheme.keys.transform.transforms:
        case (RandomizedHadamard() as rotation,) if scheme.keys.per_token:
            return rotation
    raise ValueError(
        f"scheme is {scheme.name!r}; accepted: one whose keys have a randomized Hadamard rotation alone and a "
        "per-token quantizer, such as 'hadamard-int4'"
    )
