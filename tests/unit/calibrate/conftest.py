from dataclasses import dataclass, field

import pytest
import torch

from kvlab.recording import Capture, LayerCapture, query_positions

HEADS, KV_HEADS, TOKENS, HEAD_DIM = 4, 2, 200, 16


@dataclass
class Manifest:
    model: str = "tiny"
    revision: str = "main"
    config_hash: str = "c0"
    text_hash: str = "t0"
    tokens: tuple = (0, TOKENS)


@dataclass(eq=False)
class SavedCapture(Capture):
    manifest: Manifest = field(default_factory=Manifest)


def make_layer(index, seed=0, *, offset=0.0, gain=True, kind="full", batch=1, tokens=TOKENS):
    """Keys with uneven channels and, per head, a mean of ``offset`` times a fixed pattern of signs and sizes."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    pattern = torch.Generator().manual_seed(index)
    sizes = 0.3 + torch.rand(HEAD_DIM, generator=pattern)
    mean = offset * torch.randn(KV_HEADS, 1, HEAD_DIM, generator=pattern)
    k_gain = torch.linspace(0.2, 3, HEAD_DIM)
    normed = torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, generator=generator) * sizes + mean
    positions = query_positions(tokens, 12)
    return LayerCapture(
        index=index,
        kind=kind,
        rope=not gain,
        scaling=HEAD_DIM**-0.5,
        q=2 * torch.randn(batch, HEADS, len(positions), HEAD_DIM, generator=generator),
        positions=positions,
        k=normed * k_gain if gain else normed,
        v=torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, generator=generator),
        normed_keys=normed if gain else None,
        k_gain=k_gain if gain else None,
    )


def make_capture(layers=(4, 9), seed=0, text_hash=None, sliding=(), **changes):
    manifest_changes = {name: changes.pop(name) for name in ("model", "config_hash") if name in changes}
    made = {index: make_layer(index, seed, **changes) for index in layers}
    made |= {index: make_layer(index, seed, kind="sliding", **changes) for index in sliding}
    return SavedCapture(
        "tiny", "kolibri1", lambda: made, manifest=Manifest(text_hash=text_hash or f"t{seed}", **manifest_changes)
    )


@pytest.fixture(scope="session")
def layer_of():
    return make_layer


@pytest.fixture(scope="session")
def capture_of():
    return make_capture
