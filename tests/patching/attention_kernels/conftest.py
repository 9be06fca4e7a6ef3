"""Fixtures of the tests that compare kernels.

The folder is not named `kernels`: transformers 5.0 would take it for the package of that name.
"""

import importlib
from types import SimpleNamespace

import pytest
from helpers.tiny_models import (
    MODELS,
)
from kernel_models import (
    OTHERS,
)


@pytest.fixture(autouse=True)
def others(monkeypatch):
    for name, model in OTHERS.items():
        monkeypatch.setitem(MODELS, name, model)


@pytest.fixture
def counted(monkeypatch):
    """Count the calls of each launcher."""
    counts = SimpleNamespace(rope=0, norm=0, backward=0)

    def count(module, function, name):
        module = importlib.import_module(f"rope_patch.ops.kernels.{module}")
        own = getattr(module, function)

        def counting(*args, **kwargs):
            setattr(counts, name, getattr(counts, name) + 1)
            return own(*args, **kwargs)

        monkeypatch.setattr(module, function, counting)

    count("rope", "launch", "rope")
    count("qk_norm_rope", "launch_forward", "norm")
    count("qk_norm_rope", "launch_backward", "backward")
    return counts
