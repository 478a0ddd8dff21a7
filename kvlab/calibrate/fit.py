"""Transforms fitted to captures: a mean and a matrix per full-attention layer and KV head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tqdm import tqdm

from kvlab.calibrate.closed_forms import Finder, balanced
from kvlab.calibrate.compose import rotation_of
from kvlab.calibrate.layers import full_layers
from kvlab.calibrate.sample import Sampler, mixed_sample
from kvlab.calibrate.unequal import UnequalFinder, UnequalMatrix
from kvlab.recording import Capture, LayerCapture
from kvlab.schemes import Scheme, get_scheme
from kvlab.transforms import Center, Chain, Matrix, RandomizedHadamard


def fit_transforms(
    captures: Capture | Iterable[Capture],
    finder: Finder = balanced,
    scheme: str | Scheme = "hadamard-int4",
    *,
    sampler: Sampler = mixed_sample,
    centre: bool = True,
    progress: bool = False,
) -> Chain:
    """Find the keys' mean and matrix for every full-attention layer and KV head.

    Parameters
    ----------
    captures
        One or more captures of one model.
    finder
        From `kvlab.calibrate`: `balanced`, `query_basis`, `channel_scales`, `scaled_query_basis`,
        `learned_rotation`, `learned_matrix`, what `unequal` returns, or any function like them.
    scheme
        The rotated scheme to improve; its rotation, seed included, is part of what is found.
    sampler
        How tokens and queries are weighed: `mixed_sample`, `attention_sample` or `uniform_sample`.
    centre
        Whether to subtract the (weighted) mean of the keys first.
    progress
        Show a progress bar over layers on standard error.

    Returns
    -------
    Chain
        ``Center`` where asked for, then ``Matrix``, an ``UnequalMatrix`` where `unequal` found it: takes the place of
        the scheme's rotation.

    Raises
    ------
    TypeError, ValueError
        ``captures`` are none or do not fit together, ``finder`` is no function, the scheme has no rotation alone on
        its keys, or a layer's queries or keys have no energy.
    """
    if not callable(finder):
        raise TypeError(f"finder is {finder!r}; accepted: a function of kvlab.calibrate, as balanced")
    layers, scheme = full_layers(captures), get_scheme(scheme)
    hadamard, means, matrices = rotation_of(scheme), {}, {}
    for index, own in tqdm(layers.items(), desc="fit", unit="layer", disable=not progress):
        rotation = rotation_matrix(hadamard, index, own[0].k.shape[-1])
        means[index], matrices[index] = fit_layer(own, finder, scheme, rotation, sampler=sampler, centre=centre)
    mapping = UnequalMatrix(matrices, finder.fine) if isinstance(finder, UnequalFinder) else Matrix(matrices)
    return Chain(*([Center(means)] if centre else []), mapping)


def fit_layer(
    layers: Iterable[LayerCapture],
    finder: Finder,
    scheme: Scheme,
    rotation: torch.Tensor,
    *,
    sampler: Sampler = mixed_sample,
    centre: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Find one layer's mean and matrix.

    Parameters
    ----------
    layers
        One layer of one or more captures of a model.
    finder, scheme, sampler, centre
        As in `fit_transforms`.
    rotation
        R, ``[head_dim, head_dim]``.

    Returns
    -------
    mean, matrix
        float32 ``[num_kv_heads, head_dim]``, or None where keys are not centred; float32
        ``[num_kv_heads, head_dim, head_dim]``.
    """
    sample = sampler(layers, scheme)
    mean = sample.mean.float() if centre else None
    return mean, finder(sample.minus(mean) if centre else sample, rotation).float()


def rotation_matrix(hadamard: RandomizedHadamard, layer: int, head_dim: int) -> torch.Tensor:
    """R of a layer as a matrix, float32 ``[head_dim, head_dim]``, for vectors as columns."""
    return hadamard.forward(torch.eye(head_dim), layer).mT
