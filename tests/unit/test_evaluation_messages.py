import builtins
import sys

import pytest

from kvlab.evaluation.harness import harness

pytestmark = pytest.mark.unit


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'")
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"needs lm-evaluation-harness .*pip install 'kvlab\[eval\]'"):
        harness()
