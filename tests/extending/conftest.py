"""One extension of the tiny trained model, run to its end, that all tests share."""

from pathlib import Path

import pytest
from extensions import extend_tiny


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return what `extend` returned, with its folder, for the tiny model at four times."""
    out = tmp_path_factory.mktemp("extend") / "out"
    return extend_tiny(out), Path(out)
