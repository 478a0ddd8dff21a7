import re
import sys
from pathlib import Path

import pytest
import torch

import kvlab
from kvlab.bench.cases import DecodeCase, StoreCase
from kvlab.serving import stock_kernels
from kvlab.serving.flash import flash_attention_3

pytestmark = pytest.mark.unit

ENTRANTS = [(entrant, DecodeCase(24, 2, (5,))) for entrant in stock_kernels.DECODE.values()]
ENTRANTS += [(entrant, StoreCase(24, 2, 1)) for entrant in stock_kernels.STORE.values()]


ENTRANTS += [(entrant, DecodeCase(24, 2, (5,), "prefill", 3)) for entrant in stock_kernels.PREFILL.values()]


@pytest.mark.parametrize(("entrant", "case"), ENTRANTS, ids=[*stock_kernels.DECODE, "fp8 store", "fp8 prefill"])
def test_without_vllm_an_entrant_says_so(entrant, case, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="vllm"):
        entrant(case, torch.device("cpu"))
    assert flash_attention_3() is None


@pytest.mark.parametrize(("q_len", "tokens"), [(1, 1), (1, 33), (4, 7)])
def test_the_reference_is_causal_attention(q_len, tokens):
    q = torch.randn(q_len, 6, 16, dtype=torch.float64)
    keys, values = torch.randn(2, tokens, 2, 16, dtype=torch.float64)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[-q_len:]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.movedim(1, 0), keys.movedim(1, 0), values.movedim(1, 0), mask, scale=stock_kernels.SCALE, enable_gqa=True
    )
    # Both in float64: sums of 33 products of order 1.
    torch.testing.assert_close(
        stock_kernels.causal_attention(q, keys, values), expected.movedim(0, 1), rtol=1e-12, atol=1e-12
    )


def test_only_serving_imports_vllm():
    package = Path(kvlab.__file__).parent
    sources = [path for path in package.rglob("*.py") if package / "serving" not in path.parents]
    assert len(sources) > 50
    importing = [path for path in sources if re.search(r"^\s*(import|from) vllm\b", path.read_text(), re.MULTILINE)]
    assert importing == []
