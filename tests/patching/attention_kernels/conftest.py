"""Provide fixtures for tests that compare kernels.

The folder is not named `kernels`, because transformers 5.0 would take it for that package.
"""

import importlib
from types import SimpleNamespace

import pytest
from helpers.tiny_models import MODELS
from kernel_models import OTHERS


@pytest.fixture(autouse=True)
def other_models(monkeypatch):
    """Add the models of `OTHERS` to those of all tests."""
    for name, model in OTHERS.items():
        monkeypatch.setitem(MODELS, name, model)


@pytest.fixture
def launch_counts(monkeypatch):
    """Count the calls of each launcher."""
    counts = SimpleNamespace(rope=0, norm=0, backward=0)

    def count(module, function, name):
        module = importlib.import_module(f"rope_patch.ops.kernels.{module}")
        original = getattr(module, function)

        def count_and_call(*args, **kwargs):
            setattr(counts, name, getattr(counts, name) + 1)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, count_and_call)

    count("rope", "launch", "rope")
    count("qk_norm_rope", "launch_forward", "norm")
    count("qk_norm_rope", "launch_backward", "backward")
    return counts
