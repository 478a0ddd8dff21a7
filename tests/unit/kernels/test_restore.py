import importlib.util

import pytest
import torch
from restore_cases import check_nan_stays_in_its_row, check_near_twin, inputs, shapes

from kvlab.kernels.naive.restore import restore as twin
from kvlab.kernels.restore import restore

pytestmark = pytest.mark.unit

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
backends = pytest.mark.parametrize("backend", ["naive", pytest.param("triton", marks=needs_triton), None])


def test_twin_is_the_formula():
    _, output, inverse, mean = inputs((3, 6, 2, 16))
    got = twin(output, inverse, mean)
    for token in range(3):
        for head in range(6):
            kv_head = head // 3
            expected = [
                sum(output[token, head, i].item() * inverse[kv_head, i, j].item() for i in range(16))
                + mean[kv_head, j].item()
                for j in range(16)
            ]
            torch.testing.assert_close(got[token, head], torch.tensor(expected, dtype=torch.float64))


@backends
@shapes
def test_agrees_with_twin(shape, backend):
    check_near_twin(shape, backend)


@backends
def test_nan_stays_in_its_row(backend):
    check_nan_stays_in_its_row(backend)


@backends
def test_no_tokens(backend):
    restore(torch.empty(0, 4, 64).bfloat16(), torch.eye(64).bfloat16()[None], torch.zeros(1, 64), backend=backend)


OUTPUT, INVERSE, MEAN = torch.zeros(3, 4, 64).bfloat16(), torch.zeros(2, 64, 64).bfloat16(), torch.zeros(2, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": None}, "output is a NoneType; accepted: a tensor"),
        (
            {"output": OUTPUT.float()},
            r"output is torch.float32 \[3, 4, 64\] on cpu; accepted: torch.bfloat16 \[3, 4, 64\]",
        ),
        ({"output": OUTPUT[:, :3]}, r"output has shape \[3, 3, 64\]; accepted: \[tokens, a multiple of 2, 64\]"),
        ({"output": OUTPUT[..., :32]}, r"output is .*accepted: torch.bfloat16 \[3, 4, 64\]"),
        ({"output": OUTPUT.mT.contiguous().mT}, "output is .*not contiguous"),
        ({"output": OUTPUT[0]}, r"output has shape \[4, 64\]"),
        (
            {"inverse": INVERSE[:, :32]},
            r"inverse has shape \[2, 32, 64\]; accepted: \[num_kv_heads, head_dim, head_dim\]",
        ),
        ({"inverse": INVERSE[:0]}, r"inverse has shape \[0, 64, 64\]"),
        ({"inverse": INVERSE.float()}, "inverse is torch.float32"),
        ({"inverse": "x"}, "inverse is a str"),
        ({"mean": MEAN[:1]}, r"mean is torch.float32 \[1, 64\] on cpu; accepted: torch.float32 \[2, 64\]"),
        ({"mean": MEAN.bfloat16()}, "mean is torch.bfloat16"),
        ({"mean": MEAN.to("meta")}, "mean is .* on meta; accepted: .* on cpu"),
        ({"backend": "cuda"}, "backend 'cuda' cannot run: "),
        (
            {"output": OUTPUT.to("meta"), "inverse": INVERSE.to("meta"), "mean": MEAN.to("meta")},
            "device is meta; accepted: one with memory",
        ),
        ({"backend": "numpy"}, "backend is 'numpy'; accepted: "),
    ],
)
def test_refuses(changed, message):
    given = {"output": OUTPUT, "inverse": INVERSE, "mean": MEAN} | changed
    with pytest.raises((TypeError, ValueError), match=message):
        restore(**given)
