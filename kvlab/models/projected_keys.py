"""Keys before their QK-norm gain, taken from where the model projects them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvlab.models.attention import AttentionLayer


class ProjectedKeys:
    """The newest output of a layer's ``k_proj``, kept until it is taken.

    ``k_proj`` and not ``k_norm`` is watched, because models disagree on the layout of a norm's input.

    Parameters
    ----------
    layer
        A layer with QK-norm.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer
        self._projected: torch.Tensor | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the layer's ``k_proj``; the hook is removed on leaving."""

        def keep(_module: object, _args: object, output: torch.Tensor) -> None:
            self._projected = output

        handle = self.layer.module.k_proj.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
            self._projected = None

    def take(self) -> torch.Tensor:
        """Return n(W_k x) of the newest forward, float32 ``[batch, num_kv_heads, tokens, head_dim]``."""
        projected, self._projected = self._projected, None
        return self.layer.normed_keys(projected)
