"""Provide fixtures for tests of the kernel benchmark."""

import pytest

from rope_patch.benchmarks.kernels import benchmark
from rope_patch.ops import dispatch


@pytest.fixture(scope="module")
def without_interpreter():
    """Turn Triton's interpreter off, which the kernels' tests use."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (dispatch, benchmark):
            patched.setattr(module, "is_interpreted", lambda: False)
        yield
