"""What calibration reads of a capture: its full-attention layers, and their keys as a scheme stores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from kvlab.measure.layers import measurable_layers
from kvlab.recording import Capture, LayerCapture
from kvlab.schemes import Scheme

LayerCaptures = dict[int, list[LayerCapture]]
"""By absolute decoder layer, what each capture has of it."""


def full_layers(captures: Capture | Iterable[Capture]) -> LayerCaptures:
    """Full-attention layers of one or more captures of one model; sliding layers are left out.

    Raises
    ------
    ValueError
        There is no capture or no full-attention layer, a capture holds padding, or the captures differ
        in their layers or in the number or size of their heads.
    """
    captures = [captures] if isinstance(captures, Capture) else list(captures)
    if not captures:
        raise ValueError("captures is empty; accepted: at least one capture")
    found = [{layer.index: layer for layer in measurable_layers(c) if layer.kind == "full"} for c in captures]
    if not found[0]:
        raise ValueError("captures have no full-attention layer; accepted: captures of layers='full'")
    shapes = [{index: (*layer.q.shape[1::2], layer.k.shape[1]) for index, layer in one.items()} for one in found]
    for position, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(f"captures[{position}] has other layers or heads than the first; accepted: one model")
    return {index: [one[index] for one in found] for index in sorted(found[0])}


def folds(scheme: Scheme, layer: LayerCapture) -> bool:
    """Whether ``scheme`` stores the keys of ``layer`` without their gain."""
    return scheme.fold_gain and layer.folds_gain


def stored_keys(scheme: Scheme, layer: LayerCapture) -> torch.Tensor:
    """Keys that ``scheme`` transforms and quantizes: before the gain where it folds, else as attention sees them."""
    return layer.normed_keys if folds(scheme, layer) else layer.k


def on_device(layer: LayerCapture, device: torch.device | str | None) -> LayerCapture:
    """Move a layer's tensors to ``device``; None leaves them where they are."""
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    tensors = {name: value.to(device) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return layer if device is None else dataclasses.replace(layer, **tensors)


def every_second_query(layer: LayerCapture, start: int) -> LayerCapture:
    """Keep every second sampled query, from ``start`` on.

    Raises
    ------
    ValueError
        None is left.
    """
    if len(layer.positions) <= start:
        count = len(layer.positions)
        raise ValueError(f"captures sampled {count} query position; accepted: at least two, or a holdout capture")
    return dataclasses.replace(layer, q=layer.q[:, :, start::2], positions=layer.positions[start::2])
