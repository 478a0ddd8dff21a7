import re
from pathlib import Path

import pytest

import kvlab.kernels

pytestmark = pytest.mark.unit


def test_the_example_runs_as_it_is_written():
    text = (Path(kvlab.kernels.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["out"].shape == (2, 24, 128)
    assert names["out"].isfinite().all()
