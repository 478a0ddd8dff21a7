"""One full-attention layer as the server runs it, from projection to attention, against the library in float64.

The kernels are held to their twins elsewhere. Here is what serving adds: gains and scheme folded for the heads of a
rank, slots and blocks as vLLM deals them, BF16 in and out, prefills and decodes in one batch.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")

from engines import maps

import kvlab
from kvlab.calibrate import calibrated_scheme
from kvlab.kernels.decode import DecodePlan
from kvlab.kernels.folding import encoder
from kvlab.kernels.layout import cell_bytes, read_cells
from kvlab.kernels.naive.norm_rotate_store import normalise
from kvlab.quantizers import UnequalInteger
from kvlab.serving import attention, backend
from kvlab.serving.backend import Int4Impl, Int4Metadata, Prefills

pytestmark = pytest.mark.serving

LAYER, HEAD_DIM, TOTAL_KV_HEADS, GROUP, EPS, BLOCK = 9, 128, 4, 3, 1e-6, 64
# Tokens of each sequence, the new ones included, and how many are new: two decodes, then three prefills.
LENGTHS, NEW = (150, 64, 1, 70, 130), (1, 1, 1, 70, 40)
DECODES, BLOCKS = 2, 12
BF16 = 2.0**-8
"""Of a number, at most, what rounding it to 8 binary digits takes; 0.4 of that in the mean square."""
SCHEMES = (
    "hadamard-int4",
    "hadamard-int4-refit",
    "hadamard-int4-refit-kv",
    "int4",
    "calibrated",
    "calibrated with values",
    "calibrated refit with values",
    "calibrated unequal with values",
    "calibrated unequal refit",
)


def scheme_of(name):
    if not name.startswith("calibrated"):
        return kvlab.get_scheme(name)
    generator = torch.Generator().manual_seed(2)
    keys, values = (
        ({LAYER: torch.randn(TOTAL_KV_HEADS, HEAD_DIM, generator=generator)}, {LAYER: maps(TOTAL_KV_HEADS, generator)})
        for _ in range(2)
    )
    of_values = {"value_means": values[0], "value_maps": values[1]} if name.endswith("with values") else {}
    base = "hadamard-int4-refit" if "refit" in name else "hadamard-int4"
    return calibrated_scheme(base, {LAYER: 5}, *keys, **of_values, fine=16 if "unequal" in name else 0)


class Layer:
    """The layer of one rank, and the tokens of five sequences on shuffled blocks of a poisoned cache."""

    def __init__(self, scheme, rank, size, monkeypatch):
        monkeypatch.setattr(attention, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(attention, "get_tensor_model_parallel_world_size", lambda: size)
        # What the layer asks of the server: the longest context, which bounds the workspace, and a log.
        server = SimpleNamespace(model_config=SimpleNamespace(max_model_len=256))
        monkeypatch.setattr(backend, "get_current_vllm_config", lambda: server)
        monkeypatch.setattr(backend, "announce", lambda *given: None)
        generator = torch.Generator().manual_seed(7)
        q_gain, k_gain = (torch.rand(2, HEAD_DIM, generator=generator) + 0.5).bfloat16()
        self.kv_heads = TOTAL_KV_HEADS // size
        self.heads = slice(rank * self.kv_heads, (rank + 1) * self.kv_heads)
        self.num_heads = GROUP * self.kv_heads
        norms = [SimpleNamespace(weight=gain, variance_epsilon=EPS) for gain in (q_gain, k_gain)]
        stock = SimpleNamespace(
            q_norm=norms[0],
            k_norm=norms[1],
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            total_num_kv_heads=TOTAL_KV_HEADS,
        )
        self.scheme, self.q_gain, self.k_gain = scheme, q_gain.double(), k_gain.double()
        self.store = attention.Store(stock, scheme, LAYER)
        self.store.fold()

        # The projections of whole sequences, for all ranks, with a mean and channels of unlike size.
        mean = torch.randn(GROUP + 2, TOTAL_KV_HEADS, HEAD_DIM, generator=generator)
        width = (GROUP + 2, TOTAL_KV_HEADS, HEAD_DIM)
        self.tokens = [(torch.randn(n, *width, generator=generator) + mean).bfloat16() for n in LENGTHS]
        needed = [-(-length // BLOCK) for length in LENGTHS]
        order = torch.randperm(BLOCKS, generator=generator)[: sum(needed)].split(needed)
        self.table = torch.zeros(len(LENGTHS), max(needed), dtype=torch.int32)
        for row, blocks in zip(self.table, order, strict=True):
            row[: len(blocks)] = blocks
        shape = (BLOCKS, self.kv_heads, BLOCK, cell_bytes(HEAD_DIM))
        self.cache = torch.full(shape, 0xFF, dtype=torch.uint8)

    def qkv(self, sequence, tokens):
        """The rank's part of the projection's output ``[tokens, width]``: query heads, key heads, value heads."""
        x = self.tokens[sequence][tokens][:, :, self.heads]
        return torch.cat([x[:, :GROUP].transpose(1, 2).flatten(1, 2), x[:, GROUP], x[:, GROUP + 1]], dim=1).flatten(1)

    def slots(self, sequence, tokens):
        places = torch.arange(LENGTHS[sequence])[tokens]
        return self.table[sequence, places // BLOCK].long() * BLOCK + places % BLOCK

    def run(self):
        """Store what came before, then one step of all sequences; its queries and its output."""
        for sequence, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
            before = slice(0, length - new)
            self.store(self.qkv(sequence, before), self.cache, self.slots(sequence, before))
        step = [
            (sequence, slice(length - new, length))
            for sequence, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True))
        ]
        qkv = torch.cat([self.qkv(*each) for each in step])
        seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
        plan = DecodePlan(
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            block_size=BLOCK,
            max_batch=len(LENGTHS),
            device=torch.device("cpu"),
        )
        plan.update(seq_lens[:DECODES])
        starts = torch.tensor([0, *NEW[DECODES:]]).cumsum(0).tolist()
        prefills = Prefills(sum(NEW[:DECODES]), DECODES, list(LENGTHS[DECODES:]), starts)
        slots = torch.cat([self.slots(*each) for each in step])
        metadata = Int4Metadata(DECODES, plan, prefills, slots, seq_lens, self.table)
        impl = Int4Impl(self.num_heads, HEAD_DIM, HEAD_DIM**-0.5, self.kv_heads)
        rotated = []

        def store(*given):
            rotated.append(self.store(*given))
            return rotated[0]

        # vLLM pads a batch: tokens behind the last slot are nobody's.
        qkv = torch.cat([qkv, qkv[:3]])
        out = torch.full((len(qkv), self.num_heads, HEAD_DIM), torch.nan, dtype=qkv.dtype)
        store.restore = self.store.restore
        impl.forward(SimpleNamespace(store=store), qkv, None, None, self.cache, metadata, out)
        return rotated[0], out

    def library(self, sequence):
        """Keys and values as the scheme stores them, float64 queries and keys with their gains, of all tokens."""
        heads = self.qkv(sequence, slice(None)).double().unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
        queries, keys, values = heads.split([self.num_heads, self.kv_heads, self.kv_heads])
        return normalise(queries, EPS) * self.q_gain, normalise(keys, EPS), values

    def every(self, x):
        """The rank's heads among all of the layer's, which is what the library's transforms take."""
        whole = x.new_zeros(TOTAL_KV_HEADS, *x.shape[1:])
        whole[self.heads] = x
        return whole


@pytest.fixture(params=[(0, 1), (0, 2), (1, 2), (3, 4)], ids="rank {0[0]} of {0[1]}".format)
def rank(request):
    return request.param


@pytest.fixture(params=SCHEMES)
def layer(request, rank, monkeypatch):
    return Layer(scheme_of(request.param), *rank, monkeypatch)


def new_rows():
    """Of every sequence: its number, where its new tokens are in the step, how many."""
    first = 0
    for sequence, new in enumerate(NEW):
        yield sequence, slice(first, first + new), new
        first += new


def codes(cells, quantizer):
    """The numbers from 0 to 15 in the codec's bytes; of unequal bits first those from 0 to 255."""
    packed = cells[..., :-4].short()
    codes = torch.cat([packed & 15, packed >> 4], dim=-1)
    if not isinstance(quantizer, UnequalInteger):
        return codes
    high, plain, low = codes.split([quantizer.fine, HEAD_DIM - 2 * quantizer.fine, quantizer.fine], dim=-1)
    return torch.cat([16 * high + low, plain], dim=-1)


def test_queries_are_the_librarys_to_bf16(layer):
    q, _ = layer.run()
    for sequence, rows, new in new_rows():
        queries = layer.library(sequence)[0][:, -new:]
        gain = layer.k_gain if layer.scheme.fold_gain else 1
        grouped = layer.every((queries * gain).unflatten(0, (layer.kv_heads, GROUP)).flatten(1, 2).float())
        exact = layer.scheme.keys.transform.query(grouped, LAYER)[layer.heads].double()
        if isinstance(unequal := layer.scheme.keys.quantizer, UnequalInteger):
            exact = exact @ unequal.expansion(HEAD_DIM).double()
        exact = exact.unflatten(1, (GROUP, new)).flatten(0, 1).transpose(0, 1)
        # One rounding to BF16 of each component, and the library's own float32: 128 additions of numbers below 16.
        assert ((q[rows].double() - exact).abs() <= BF16 * exact.abs() + 128 * 16 * 2**-24).all()


def test_codes_are_the_librarys(layer):
    layer.run()
    for sequence, length in enumerate(LENGTHS):
        _, keys, values = layer.library(sequence)
        keys = keys if layer.scheme.fold_gain else keys * layer.k_gain
        keys = layer.scheme.keys.transform.forward(layer.every(keys.float()), LAYER)[layer.heads]
        stored = read_cells(layer.cache, layer.table[sequence], length)
        expected = [keys, layer.scheme.values.transform.forward(layer.every(values.float()), LAYER)[layer.heads]]
        if not layer.scheme.values.transform.transforms:
            # Values are BF16 as the projection left them: not a bit may differ.
            assert torch.equal(stored[1], encoder(layer.scheme.values.quantizer)(expected.pop()))
        for cells, vectors, side in zip(stored, expected, (layer.scheme.keys, layer.scheme.values), strict=False):
            ours, theirs = (codes(each, side.quantizer) for each in (cells, encoder(side.quantizer)(vectors)))
            # They differ in float32's last digits, 1e-6 of a step or so; a code flips where one lies that near to a
            # tie, or where scale or offset round to the next fp16 number, which moves codes by a hundredth: one of each
            # hundred.
            assert (ours - theirs).abs().max() <= 1
            assert (ours != theirs).double().mean() <= 0.01


def test_attention_is_the_librarys_to_bf16(layer):
    _, out = layer.run()
    assert out[: sum(NEW)].isfinite().all()
    # Rows of padding belong to no sequence and stay.
    assert out[sum(NEW) :].isnan().all()
    for sequence, rows, new in new_rows():
        length = LENGTHS[sequence]
        queries, keys, values = layer.library(sequence)
        stored = keys if layer.scheme.fold_gain else keys * layer.k_gain
        stored = layer.scheme.keys.roundtrip(layer.every(stored.float()), LAYER)[layer.heads].double()
        stored = stored * layer.k_gain if layer.scheme.fold_gain else stored
        values = layer.scheme.values.roundtrip(layer.every(values.float()), LAYER)[layer.heads].double()
        grouped = queries[:, -new:].unflatten(0, (layer.kv_heads, GROUP))
        scores = grouped @ stored[:, None].mT * HEAD_DIM**-0.5
        future = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
        exact = (scores.masked_fill(future, -torch.inf).softmax(-1) @ values[:, None]).flatten(0, 1).transpose(0, 1)
        error = (out[rows].double() - exact).norm() / exact.norm()
        # The rounding of a rotated query, 0.4 of BF16 in the mean square, moves a score by that much of its spread, and
        # with a spread near 1, as here, the output by as much; the output is rounded itself: 0.4 times the square root
        # of 2 is 0.6. The rest has room for the workspace's fp16, an eighth of it, and for codes that flip.
        # A map of values takes two more: of the output before it is mapped back and of the map, of numbers up to 1.5
        # times the output's, since means and values have nothing in common here: 0.4 times the square root of
        # 2 + 2 · 1.5² is 1.0.
        assert error <= (2 * BF16 if layer.scheme.values.transform.transforms else BF16)
