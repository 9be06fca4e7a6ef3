"""Set up every test: no network, one thread, quiet libraries."""

import gc
import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, so set before
os.environ["OMP_NUM_THREADS"] = "1"  # or accelerate gives each process of a group all cores: 5x CPU

import pytest
import torch

if not torch.cuda.is_available():  # Triton's kernels run on the CPU then; read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
from helpers.triton_interpreter import hasten_interpreter
from helpers.undrawn import leave_undrawn

pytest_plugins = ["helpers.file_times"]

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
hasten_interpreter()


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage():
    """Take what is imported out of garbage collection, which accelerate runs at each training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def restored_log_level():
    """Restore the package's log level after each test, because commands change it."""
    log = logging.getLogger("rope_patch")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="module")
def never_drawn():
    """Leave the figures of a module's reports undrawn, also in fixtures and forked processes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_undrawn(monkeypatch)
        yield


@pytest.fixture
def reset_compiler():
    """Forget compiled graphs and their counters, before and after a test."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    gc.disable()  # collections would take an eighth of the time: traces keep what they make
    yield
    gc.enable()
    torch._dynamo.reset()


@pytest.fixture
def own_registry(monkeypatch):
    """Forget the methods from outside that a test registers, and its plugins."""
    from rope_patch.exporting import engines
    from rope_patch.methods import registry
    from rope_patch.utils import plugins

    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setattr(plugins, "_imported", set())
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    for module in (registry, engines):
        group = plugins.PluginGroup(module._GROUP.group)
        monkeypatch.setattr(module, "_GROUP", group)
