"""Which layers of a capture a measurement reads."""

from __future__ import annotations

from collections.abc import Iterator

from tqdm import tqdm

from kvlab.recording import Capture, LayerCapture


def measurable_layers(capture: Capture, *, label: str | None = None) -> Iterator[LayerCapture]:
    """Yield a capture's layers one by one, in the model's order; ``label`` shows a progress bar with that name.

    One by one, because a capture on disk reads a layer when it is asked for.

    Raises
    ------
    TypeError
        ``capture`` is none.
    ValueError
        Nothing was captured, or padding was: pad tokens are no part of a text, and would count in every
        mean and be attended to.
    """
    if not isinstance(capture, Capture):
        raise TypeError(f"capture is a {type(capture).__name__}; accepted: what kvlab.capture or open_capture gives")
    layers = capture.layers
    if capture.padded:
        raise ValueError("capture holds padding; accepted: texts of equal length, or one at a time")
    for index in tqdm(layers, desc=label, unit="layer", disable=label is None):
        yield layers[index]
