import pytest
import torch
from restore_cases import check_nan_stays_in_its_row, check_near_twin, inputs, shapes

from kvlab.kernels.restore import restore

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@shapes
def test_agrees_with_twin(shape):
    check_near_twin(shape, "triton", "cuda")


def test_agrees_with_twin_on_a_chunk_of_a_prompt():
    check_near_twin((8191, 24, 2, 128), None, "cuda")


def test_nan_stays_in_its_row():
    check_nan_stays_in_its_row("triton", "cuda")


def test_replays_in_a_graph():
    _, output, inverse, mean = inputs((64, 48, 4, 128), "cuda")
    given = output.clone()
    restore(output, inverse, mean)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        restore(output, inverse, mean)
    output.copy_(given)
    graph.replay()
    expected = given.clone()
    restore(expected, inverse, mean)
    assert torch.equal(output, expected)
