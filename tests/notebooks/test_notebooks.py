import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.notebook

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {
    "01-rounding",
    "02-outliers",
    "03-attention-error",
    "04-loss",
    "07-kernels",
    "08-capacity",
    "09-throughput",
    "10-ruler",
    "11-gpqa",
    "12-overview",
    "13-key-maps",
    "14-testbed",
}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_notebook_per_figure():
    assert {path.stem for path in NOTEBOOKS} >= FIGURES | {"00-quickstart", "05-your-own-quantizer"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_executed_small_and_thin(path):
    assert path.stat().st_size < 300_000
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in code_cells(notebook))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    if path.stem in FIGURES:
        assert any("image/png" in output.get("data", {}) for output in outputs)
    for cell in code_cells(notebook):
        if "plots.plot_" in cell.source:
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert len(node.body) <= 2, f"{node.name} belongs in the library"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_quick_form(path, monkeypatch):
    monkeypatch.setenv("KVLAB_QUICK", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
