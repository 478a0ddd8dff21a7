"""Search over rotation seeds: the same layer stored under many sign patterns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd
import torch
from scipy.stats import spearmanr
from tqdm import tqdm

from kvlab.calibrate.compose import calibrated_scheme, rotation_of
from kvlab.calibrate.layers import LayerCaptures, full_layers, stored_keys
from kvlab.calibrate.objective import KeyObjective, query_covariance
from kvlab.recording import Capture, LayerCapture
from kvlab.schemes import Scheme, get_scheme
from kvlab.transforms import Center
from kvlab.transforms.parameters import check_integer

Means = Mapping[int, torch.Tensor]


def search_seeds(
    captures: Capture | Iterable[Capture],
    scheme: str | Scheme = "hadamard-int4",
    seeds: int | Iterable[int] = 200,
    *,
    means: Means | None = None,
    tokens: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Objective of every seed in every full-attention layer.

    Parameters
    ----------
    captures
        One or more captures of one model.
    scheme
        The rotated scheme whose seed is searched.
    seeds
        The seeds, or how many of them from 0 on.
    means
        Key means per layer (`key_means`), subtracted before the rotation; None centres nothing.
    tokens
        At most so many evenly spaced tokens per sequence; None takes all. `ranking_agreement` says what the
        subsample costs.
    device
        Where to compute, one layer at a time; None is where the capture lies.
    progress
        Show a progress bar over layers and seeds on standard error.

    Returns
    -------
    pandas.DataFrame
        Columns ``layer``, ``seed``, ``objective``: the mean over captures and KV heads of
        `weighted_key_error`, relative.

    Raises
    ------
    TypeError, ValueError
        The captures do not fit together, the scheme has no rotation to search, ``means`` lack a layer, or a
        number is not as described.
    """
    layers = full_layers(captures)
    return search_layers(layers, get_scheme(scheme), seeds, means, tokens, device, progress=progress)


def search_layers(
    layers: LayerCaptures,
    scheme: Scheme,
    seeds: int | Iterable[int],
    means: Means | None,
    tokens: int | None,
    device: torch.device | str | None,
    *,
    progress: bool,
) -> pd.DataFrame:
    """Search layers already chosen, as `search_seeds`."""
    rotation_of(scheme)
    seeds, tokens = check_seeds(seeds), check_tokens(tokens)
    rows = []
    with tqdm(total=len(layers) * len(seeds), desc="seed search", unit="seed", disable=not progress) as bar:
        for index, own in layers.items():
            objectives = [_objective(layer, scheme, means, tokens, device) for layer in own]
            for seed in seeds:
                keys = calibrated_scheme(scheme, seed).keys
                errors = torch.stack([objective.error(keys, index) for objective in objectives])
                rows.append((index, seed, errors.mean().item()))
                bar.update()
    return pd.DataFrame(rows, columns=["layer", "seed", "objective"])


def _objective(
    layer: LayerCapture, scheme: Scheme, means: Means | None, tokens: int | None, device: torch.device | str | None
) -> KeyObjective:
    keys = stored_keys(scheme, layer)
    if tokens is not None:
        keys = keys[..., :: -(-keys.shape[-2] // tokens), :]
    keys = keys.to(device or keys.device)
    # Centring comes before the rotation and is the same for every seed.
    keys = keys if means is None else Center(means).forward(keys, layer.index)
    return KeyObjective(keys, query_covariance(layer, scheme).to(keys.device))


MOST_SEEDS = 1_000_000
"""To be tried, weeks of work: a number of more is a slip."""


def check_seeds(seeds: int | Iterable[int]) -> list[int]:
    """List the seeds meant, each once, in increasing order.

    Raises
    ------
    TypeError, ValueError
        A seed is no integer ≥ 0, or there is none.
    """
    if not isinstance(seeds, Iterable):
        seeds = range(check_integer(seeds, "seeds", minimum=1, maximum=MOST_SEEDS))
    listed = sorted({check_integer(seed, "a seed of seeds", minimum=0) for seed in seeds})
    if not listed:
        raise ValueError("seeds is empty; accepted: at least one seed")
    return listed


def check_tokens(tokens: int | None) -> int | None:
    """Check how many tokens of a sequence are searched on: two at least, since one has nothing to be told from.

    Raises
    ------
    TypeError, ValueError
        It is no integer, or fewer; None is all of them.
    """
    return None if tokens is None else check_integer(tokens, "tokens", minimum=2)


def ranking_agreement(
    captures: Capture | Iterable[Capture],
    scheme: str | Scheme = "hadamard-int4",
    seeds: int | Iterable[int] = 16,
    *,
    tokens: int,
    means: Means | None = None,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """How well a subsample of tokens orders the seeds as all tokens do.

    Parameters
    ----------
    captures, scheme, seeds, means, device
        As in `search_seeds`.
    tokens
        Size of the subsample.

    Returns
    -------
    pandas.DataFrame
        Columns ``layer`` and ``spearman``, the rank correlation over the seeds: 1 means the same order.

    Raises
    ------
    TypeError, ValueError
        As `search_seeds`; or there are fewer than three seeds.
    """
    if len(seeds := check_seeds(seeds)) < 3:
        raise ValueError(f"seeds has {len(seeds)}; accepted: at least three, to compare orders")
    layers, scheme = full_layers(captures), get_scheme(scheme)
    sample, whole = (
        search_layers(layers, scheme, seeds, means, count, device, progress=False).pivot(
            index="layer", columns="seed", values="objective"
        )
        for count in (tokens, None)
    )
    rows = [(layer, spearmanr(sample.loc[layer], whole.loc[layer]).statistic) for layer in layers]
    return pd.DataFrame(rows, columns=["layer", "spearman"])
