"""Calibration from captures: search the seeds, let held-out attention decide, write down how it went."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import pandas as pd
import torch
from tqdm import tqdm

import kvlab
from kvlab.calibrate.closed_forms import FINDERS
from kvlab.calibrate.compose import calibrated_scheme, check_base, rotation_of
from kvlab.calibrate.file import FINE as FINE_CHANNELS
from kvlab.calibrate.file import FORMAT, Calibration
from kvlab.calibrate.fit import fit_layer, rotation_matrix
from kvlab.calibrate.layers import every_second_query, full_layers, on_device
from kvlab.calibrate.means import layer_means
from kvlab.calibrate.seeds import Means, check_seeds, check_tokens, search_layers
from kvlab.calibrate.unequal import FINE_COUNTS, unequal
from kvlab.calibrate.values import fit_values
from kvlab.checks import check_choice
from kvlab.measure.attention import Stored, layer_errors
from kvlab.provenance import today
from kvlab.recording import Capture, LayerCapture
from kvlab.schemes import Scheme, get_scheme
from kvlab.transforms import RandomizedHadamard
from kvlab.transforms.parameters import check_integer

OBJECTIVE = "relative score error of the stored keys: √(tr(C S_e) / tr(C S_k)), mean over captures and KV heads"
UNEQUAL = unequal.__name__
FINDER_NAMES = (UNEQUAL, *FINDERS)
"""What `calibrate` takes: a map for unequal bits, or for equal ones where that is better, and maps for equal bits."""
DIGITS = 6
"""Significant digits of what the manifest keeps: sums differ beyond them between machines."""


class CaptureManifest(Protocol):
    """What calibration reads of a capture's manifest on disk."""

    model: str
    revision: str
    config_hash: str
    text_hash: str
    tokens: object


def calibrate(
    captures: Capture | Iterable[Capture],
    holdout: Capture | Iterable[Capture] | None = None,
    *,
    scheme: str | Scheme = "hadamard-int4",
    seeds: int | Iterable[int] = 200,
    tokens: int | None = None,
    finalists: int = 5,
    centre: bool = True,
    finder: str | None = None,
    values: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Calibration:
    """Find a rotation seed, key means and, where asked for, maps of keys and values for every full-attention layer.

    Every seed is ranked by the covariance-weighted key error with the centring in force (`search_seeds`). The best
    few of each layer are ranked again by the attention-output error, K stored, on what was held out.

    Parameters
    ----------
    captures
        One or more captures read from disk, of one model.
    holdout
        Captures of other texts of the same model. None holds out every second sampled query of ``captures``, which
        then has no part in the covariance.
    scheme
        The rotated scheme to calibrate, registered under its name.
    seeds
        The seeds, or how many of them from 0 on.
    tokens
        At most so many evenly spaced tokens per sequence in the search; means and errors always take all.
    finalists
        Seeds per layer that are ranked again.
    centre
        Whether to subtract the keys' means.
    finder
        How to find a matrix per KV head that takes the place of the rotation, by its name in
        `kvlab.calibrate.closed_forms.FINDERS`; None only rotates. It is taken in the layers where it lowers the error
        of what was held out. "unequal" tries "balanced" and, with unequal bits, `kvlab.calibrate.unequal` of every
        number of fine channels in ``FINE_COUNTS``; the number with the least mean error over layers is every layer's.
    values
        Whether to find a mean and a matrix of the values too (`fit_values`), taken by the same rule.
    device
        Where to compute, one layer at a time; None is where the captures lie.
    progress
        Show progress bars on standard error.

    Returns
    -------
    Calibration
        With the spread over all seeds, and each layer's error before (``scheme`` itself) and after.

    Raises
    ------
    TypeError, ValueError
        Captures without a manifest, of different models, with padding or without full-attention layers; a holdout
        capture of a text that is calibrated on; a scheme without a rotation; a finder or number that is not as
        described.
    """
    captures, holdout = _listed(captures), _listed(holdout)
    if finder is not None:
        check_choice(finder, "finder", FINDER_NAMES)
    _check_manifests(captures, holdout)
    finalists, seeds, scheme = check_integer(finalists, "finalists", minimum=1), check_seeds(seeds), get_scheme(scheme)
    # Before the keys are read and the search, which take long.
    tokens = check_tokens(tokens)
    check_base(scheme, values=values, fine=FINE_COUNTS[0] if finder == UNEQUAL else 0)
    searched, judged = full_layers(captures), full_layers(holdout or captures)
    full_layers([*captures, *holdout])
    if not holdout:
        searched, judged = ({i: [every_second_query(x, s) for x in own] for i, own in judged.items()} for s in (0, 1))
    means = layer_means(searched, scheme) if centre else None
    search = search_layers(searched, scheme, seeds, means, tokens, device, progress=progress)
    best = search.sort_values(["objective", "seed"]).groupby("layer")["seed"].apply(lambda own: own.iloc[:finalists])
    layers, found, value_means, value_maps = {}, {}, {}, {}
    for index, own in tqdm(judged.items(), desc="finalists", unit="layer", disable=not progress):
        before, errors = _judge(own, scheme, best[index].tolist(), means, device)
        layers[index] = _entry(search[search["layer"] == index], before, errors)
        if finder is not None:
            found[index] = _maps(searched[index], own, scheme, finder, layers[index], index, means, device)
        if values:
            value_means[index], value_maps[index] = _values(searched[index], own, scheme, layers[index], index, device)
    fine, maps = _choose(found, layers, means)
    first = next(iter(judged.values()))[0]
    manifest = {
        "format": FORMAT,
        "kvlab": kvlab.__version__,
        "date": today(),
        "model": captures[0].manifest.model,
        "config_hash": captures[0].manifest.config_hash,
        "num_kv_heads": first.k.shape[1],
        "head_dim": first.k.shape[3],
        "scheme": scheme.name,
        "ingredients": [
            "rotation_seeds",
            *(["key_means"] if centre else []),
            *(["key_maps"] if maps else []),
            *(["value_means", "value_maps"] if values else []),
            *([FINE_CHANNELS] if fine else []),
        ],
        "captures": [_identity(capture.manifest) for capture in captures],
        "holdout": [_identity(capture.manifest) for capture in holdout],
        "objective": OBJECTIVE,
        "search": {"seeds": seeds, "tokens": tokens, **({"finder": finder} if maps else {})},
        "layers": {str(index): entry for index, entry in layers.items()},
    }
    winners = {index: _winner(entry) for index, entry in layers.items()}
    return Calibration(winners, means, manifest, maps or None, value_means or None, value_maps or None, fine)


def _judge(
    layers: list[LayerCapture], scheme: Scheme, seeds: list[int], means: Means | None, device: torch.device | str | None
) -> tuple[float, dict[int, float]]:
    """Held-out attention-output error of ``scheme`` and of each seed, the mean over captures."""
    candidates = {seed: calibrated_scheme(scheme, seed, means, name=f"seed {seed}") for seed in seeds}
    mean = _mean_errors(layers, [scheme, *candidates.values()], "K", device)
    return mean[scheme.name], {seed: mean[candidate.name] for seed, candidate in candidates.items()}


def _mean_errors(
    layers: list[LayerCapture], schemes: list[Scheme], stored: Stored, device: torch.device | str | None
) -> dict[str, float]:
    """Return the attention-output error of each scheme by name, the mean over captures."""
    errors = [layer_errors(on_device(layer, device), schemes, [stored]) for layer in layers]
    return {name: sum(one[name, stored] for one in errors) / len(errors) for name, _ in errors[0]}


class _Map(NamedTuple):
    """A layer's mean and matrix, and its error on what is held out."""

    mean: torch.Tensor | None
    matrix: torch.Tensor
    error: float


def _maps(
    searched: list[LayerCapture],
    judged: list[LayerCapture],
    scheme: Scheme,
    finder: str,
    entry: dict,
    index: int,
    means: Means | None,
    device: torch.device | str | None,
) -> dict[int, _Map]:
    """Find a layer's maps on what is searched, by the number of fine channels.

    With none, the map is the best rotation where that is better; enters the map's own error.
    """
    hadamard = RandomizedHadamard(_winner(entry), rotation_of(scheme).block_size)
    head_dim = judged[0].k.shape[-1]
    rotation = rotation_matrix(hadamard, index, head_dim)
    tried = {0: FINDERS["balanced" if finder == UNEQUAL else finder]}
    if finder == UNEQUAL:
        tried |= {fine: unequal(fine) for fine in FINE_COUNTS if 2 * fine < head_dim}
    found = {}
    for fine, find in tried.items():
        mean, matrix = fit_layer(searched, find, scheme, rotation, centre=means is not None)
        own_means = None if mean is None else {index: mean}
        own = calibrated_scheme(scheme, 0, own_means, {index: matrix}, fine=fine, name="map")
        found[fine] = _Map(mean, matrix, _rounded(_mean_errors(judged, [own], "K", device)["map"]))
    entry["error_map"] = found[0].error
    if entry["error_map"] >= entry["error_after"]:
        matrix = rotation.expand(judged[0].k.shape[1], -1, -1)
        found[0] = _Map(None if means is None else means[index], matrix, entry["error_after"])
    if finder == UNEQUAL:
        entry["errors_by_fine"] = {str(fine): one.error for fine, one in found.items()}
    return found


def _choose(
    found: dict[int, dict[int, _Map]], entries: dict[int, dict], means: Means | None
) -> tuple[int, dict[int, torch.Tensor]]:
    """Choose the number of fine channels for all layers; return it and the maps, enter their errors and means."""
    if not found:
        return 0, {}
    tried = next(iter(found.values()))
    # Of equal errors the fewest.
    fine = min(sorted(tried), key=lambda fine: sum(own[fine].error for own in found.values()))
    for index, own in found.items():
        entries[index]["error_after"] = own[fine].error
        if means is not None:
            means[index] = own[fine].mean
    return fine, {index: own[fine].matrix for index, own in found.items()}


def _values(
    searched: list[LayerCapture],
    judged: list[LayerCapture],
    scheme: Scheme,
    entry: dict,
    index: int,
    device: torch.device | str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find a layer's mean and map of values; return them, or those that leave values as they are.

    Enters the errors, V stored, without and with what is returned.
    """
    hadamard = RandomizedHadamard(_winner(entry), rotation_of(scheme).block_size)
    mean, matrix = fit_values(searched, rotation_matrix(hadamard, index, judged[0].v.shape[-1]))
    of_values = {"value_means": {index: mean}, "value_maps": {index: matrix}}
    mapped = calibrated_scheme(scheme, 0, **of_values, name="mapped")
    errors = _mean_errors(judged, [scheme, mapped], "V", device)
    entry["value_error_before"] = _rounded(errors[scheme.name])
    entry["value_error_after"] = _rounded(min(errors.values()))
    if errors["mapped"] < errors[scheme.name]:
        return mean, matrix
    return torch.zeros_like(mean), torch.eye(matrix.shape[-1]).expand_as(matrix)


def _entry(search: pd.DataFrame, before: float, errors: dict[int, float]) -> dict:
    """Sum up one layer for the manifest."""
    return {
        "objectives": [_rounded(value) for value in search["objective"]],
        "finalists": {str(seed): _rounded(error) for seed, error in errors.items()},
        "error_before": _rounded(before),
        "error_after": _rounded(min(errors.values())),
    }


def _winner(entry: dict) -> int:
    """Return the finalist of the least error; of equal ones the first in the search's order."""
    return int(min(entry["finalists"], key=entry["finalists"].get))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _listed(captures: Capture | Iterable[Capture] | None) -> list[Capture]:
    return [captures] if isinstance(captures, Capture) else list(captures or [])


def _check_manifests(captures: list[Capture], holdout: list[Capture]) -> None:
    every = [*captures, *holdout]
    for capture in every:
        if getattr(capture, "manifest", None) is None:
            raise TypeError(f"captures has a {type(capture).__name__} without manifest; accepted: captures from disk")
    for capture in every:
        for name in ("model", "config_hash"):
            expected, found = (getattr(one.manifest, name) for one in (every[0], capture))
            if found != expected:
                raise ValueError(f"captures have different {name}s, {expected} and {found}; accepted: one model")
    for text_hash in {one.manifest.text_hash for one in captures} & {one.manifest.text_hash for one in holdout}:
        raise ValueError(f"holdout has the text {text_hash}, which is calibrated on; accepted: other texts")


def _identity(manifest: CaptureManifest) -> dict:
    """Which capture of which text."""
    fields = {name: getattr(manifest, name) for name in ("model", "revision", "config_hash", "text_hash", "tokens")}
    text = json.dumps(fields, sort_keys=True)
    kept = {name: value for name, value in json.loads(text).items() if name in ("revision", "text_hash", "tokens")}
    return {"capture_hash": hashlib.sha256(text.encode()).hexdigest(), **kept}
