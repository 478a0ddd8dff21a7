"""How large each channel of a layer's keys is, head by head: whether outliers are fixed, and what makes them so."""

from __future__ import annotations

import pandas as pd
import torch

from kvlab.measure.layers import measurable_layers
from kvlab.recording import Capture


def channel_table(capture: Capture) -> pd.DataFrame:
    """Magnitude of every channel of the keys, with and without their QK-norm gain.

    Parameters
    ----------
    capture
        From `kvlab.capture`.

    Returns
    -------
    pandas.DataFrame
        A row per ``layer``, ``form`` (``"raw"``, and ``"without gain"`` for models with QK-norm), ``head`` and
        ``channel``: ``magnitude``, the channel's mean of ``|x_c|`` over tokens in units of its head's average
        channel; ``mean``, its signed mean over the root mean square norm of the head's keys, so that the squares of a
        head add up to the mean's share of the keys' energy.

    Raises
    ------
    ValueError
        The capture is empty or holds padding.
    """
    parts = []
    for layer in measurable_layers(capture):
        forms = {"raw": layer.k, "without gain": layer.normed_keys}
        for form, x in forms.items():
            if x is not None:
                parts += [_channels(head).assign(layer=layer.index, form=form, head=h) for h, head in _heads(x)]
    table = pd.concat(parts, ignore_index=True)
    return table[["layer", "form", "head", "channel", "magnitude", "mean"]]


def _heads(x: torch.Tensor) -> enumerate[torch.Tensor]:
    """Every KV head's keys, those of all sequences together, ``[tokens, head_dim]``."""
    return enumerate(x.float().movedim(1, 0).flatten(1, 2))


def _channels(x: torch.Tensor) -> pd.DataFrame:
    sizes = x.abs().mean(0, dtype=torch.float64)
    norm = x.square().sum(-1, dtype=torch.float64).mean().sqrt()
    columns = {"magnitude": sizes / sizes.mean(), "mean": x.mean(0, dtype=torch.float64) / norm}
    table = pd.DataFrame({name: column.cpu().numpy() for name, column in columns.items()})
    return table.rename_axis("channel").reset_index()
