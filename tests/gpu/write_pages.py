"""Write ``tests/data/pages_h200.safetensors`` on a GPU: what the CUDA kernels make of a prompt, page by page.

``python tests/gpu/write_pages.py FILE``, on a Hopper GPU; `tests/unit/kernels/test_pages_from_a_gpu.py` reads it on any
machine.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import kvlab
from kvlab import provenance
from kvlab.kernels.decode import DecodePlan
from kvlab.kernels.expand import Spans, expand
from kvlab.kernels.store import norm_rotate_store
from kvlab.serving.schemes import layer_folding

SHAPE = {"num_heads": 6, "num_kv_heads": 2}
HEAD_DIM, BLOCK_SIZE, LAYER = 128, 32, 9
# A whole block, one that is begun, and blocks in no order.
TOKENS, BLOCKS = 50, (2, 0)


def inputs():
    """Projection ``[tokens, (num_heads + 2 num_kv_heads) head_dim]`` in bfloat16 and the gains of queries and keys."""
    generator = torch.Generator().manual_seed(9)
    width = (SHAPE["num_heads"] + 2 * SHAPE["num_kv_heads"]) * HEAD_DIM
    # Fixed channels larger than the others, as in real keys.
    channels = 1 + 6 * (torch.arange(width) % 37 == 0)
    qkv = (torch.randn(TOKENS, width, generator=generator) * channels).bfloat16()
    return qkv, torch.rand(2, HEAD_DIM, generator=generator) + 0.5


def main(path, device="cuda"):
    qkv, gains = inputs()
    q_gain, k_gain = gains.to(device)
    folding = layer_folding(kvlab.get_scheme("hadamard-int4"), LAYER, q_gain, k_gain, [0, 1])
    cache = torch.zeros(3, SHAPE["num_kv_heads"], BLOCK_SIZE, HEAD_DIM + 8, dtype=torch.uint8, device=device)
    table = torch.tensor([BLOCKS], dtype=torch.int32, device=device)
    tokens = torch.arange(TOKENS, device=device)
    slots = table[0, tokens // BLOCK_SIZE].long() * BLOCK_SIZE + tokens % BLOCK_SIZE
    queries = norm_rotate_store(qkv.to(device), cache, slots, folding, **SHAPE, backend="cuda")
    shape = (2, TOKENS, SHAPE["num_kv_heads"], HEAD_DIM)
    workspace = torch.full(shape, torch.nan, dtype=torch.float16, device=device)
    keys, values = expand(cache, table, Spans([(0, 0, TOKENS)], device), workspace, backend="cuda")
    seq_lens = torch.tensor([TOKENS], dtype=torch.int32, device=device)
    plan = DecodePlan(**SHAPE, block_size=BLOCK_SIZE, max_batch=1, device=device)
    plan.update(seq_lens)
    out = torch.empty(1, SHAPE["num_heads"], HEAD_DIM, device=device)
    plan.attend(queries[-1:].contiguous(), cache, table, seq_lens, out=out)
    tensors = {
        "qkv": qkv,
        "gains": gains,
        "cache": cache,
        "queries": queries,
        "keys": keys,
        "values": values,
        "out": out,
    }
    metadata = {"machine": provenance.machine(), "versions": provenance.versions(), "date": provenance.today()}
    save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, path, metadata=metadata)
    print(path, Path(path).stat().st_size, "bytes;", metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
