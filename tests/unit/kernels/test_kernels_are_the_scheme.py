"""What the kernels store and attend with is what the library means by ``hadamard-int4``."""

import pytest
import torch

import kvlab
from kvlab import codec
from kvlab.kernels.decode import DecodePlan
from kvlab.kernels.folding import Folding
from kvlab.kernels.layout import read_cells
from kvlab.kernels.naive.norm_rotate_store import normalise
from kvlab.kernels.store import norm_rotate_store
from kvlab.transforms import FoldedQKNorm

pytestmark = pytest.mark.unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, EPS = 6, 2, 128, 1e-6
HEADS = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
LAYERS, PROMPT, STEPS, BLOCKS = (4, 9, 14), 70, 8, 3


class Layer:
    """One layer's gains, matrices and cache, the prompt stored."""

    def __init__(self, index):
        self.index, self.scheme = index, kvlab.get_scheme("hadamard-int4")
        generator = torch.Generator().manual_seed(index)
        self.q_gain, self.k_gain = (torch.rand(2, HEAD_DIM, generator=generator) + 0.5).to(DEVICE)
        folded = FoldedQKNorm(self.scheme.keys.transform, self.q_gain, self.k_gain)
        self.folding = Folding(folded.query_matrix(index)[None], folded.key_matrix(index)[None])
        self.cache = torch.zeros(BLOCKS, NUM_KV_HEADS, 32, HEAD_DIM + 8, dtype=torch.uint8, device=DEVICE)
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        self.qkv = torch.randn(PROMPT + STEPS, width, generator=generator).bfloat16().to(DEVICE)
        norm_rotate_store(self.qkv[:PROMPT], self.cache, torch.arange(PROMPT, device=DEVICE), self.folding, **HEADS)

    def heads(self, tokens):
        """Queries, keys without gain, values, ``[heads, tokens, head_dim]``."""
        heads = self.qkv[:tokens].float().unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
        queries, keys, values = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS])
        return normalise(queries, EPS), normalise(keys, EPS), values

    def stored(self, tokens):
        """Keys without gain and values as the cache holds them, rotated back."""
        keys, values = map(codec.decode, read_cells(self.cache, torch.arange(BLOCKS, device=DEVICE), tokens))
        return self.scheme.keys.transform.inverse(keys, self.index), values

    def expected(self, tokens):
        """Attention of the last token, from the projection's query and what is stored."""
        (queries, _, _), (keys, values) = self.heads(tokens), self.stored(tokens)
        keys = keys * self.k_gain
        queries = (queries[:, -1] * self.q_gain).unflatten(0, (NUM_KV_HEADS, -1))
        return ((queries @ keys.mT * HEAD_DIM**-0.5).softmax(-1) @ values).flatten(0, 1)


def test_layers_and_steps_in_a_row():
    """A step after the other as a server runs them, on one workspace: on a GPU out of one CUDA graph."""
    layers, plan = [Layer(index) for index in LAYERS], DecodePlan(**HEADS, block_size=32, max_batch=1, device=DEVICE)
    table = torch.arange(BLOCKS, dtype=torch.int32, device=DEVICE)[None]
    seq_lens = torch.tensor([PROMPT], dtype=torch.int32, device=DEVICE)
    slot = torch.tensor([PROMPT], device=DEVICE)
    new = torch.empty(len(layers), 1, layers[0].qkv.shape[1], dtype=torch.bfloat16, device=DEVICE)
    outs = torch.empty(len(layers), 1, NUM_HEADS, HEAD_DIM, device=DEVICE)

    def step():
        plan.update(seq_lens)
        for layer, qkv, out in zip(layers, new, outs, strict=True):
            q = norm_rotate_store(qkv, layer.cache, slot, layer.folding, **HEADS)
            plan.attend(q, layer.cache, table, seq_lens, out=out)

    graph = None
    for number in range(STEPS):
        seq_lens.fill_(PROMPT + number + 1)
        slot.fill_(PROMPT + number)
        new.copy_(torch.stack([layer.qkv[PROMPT + number][None] for layer in layers]))
        outs.fill_(torch.nan)
        if graph is None:
            step()
        else:
            graph.replay()
        if DEVICE == "cuda" and graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            expected = layer.expected(PROMPT + number + 1)
            # The rotated query is rounded to bfloat16, 2⁻⁹ of each component: of a score's spread, which is about 1
            # here, and so of the output; as much again for fp16 inside the kernel.
            assert (out[0] - expected).norm() / expected.norm() < 2**-8


def test_the_cells_are_the_schemes_round_trip():
    layer = Layer(LAYERS[0])
    _, keys, values = layer.heads(PROMPT)
    sides = (layer.scheme.keys, keys), (layer.scheme.values, values)
    for (side, x), stored in zip(sides, layer.stored(PROMPT), strict=True):
        differs = (side.roundtrip(x, layer.index) - stored).norm(dim=-1) / x.norm(dim=-1) > 1e-3
        # Sums of another order put one component of some ten thousand on the other side of a rounding boundary.
        assert differs.float().mean() < 0.02
