"""Test that docs/encoding-properties.md equals the script's output."""

import importlib.util
from pathlib import Path

import pytest

from rope_patch.encodings.properties import PROPERTIES
from rope_patch.encodings.subject import SUBJECTS

SCRIPT = Path(__file__).parents[2] / "docs" / "generate" / "properties.py"


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("properties_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(page):
    assert page.PAGE.read_text(encoding="utf-8") == page.build(), (
        "docs/encoding-properties.md is not what the code computes: run "
        "python docs/generate/properties.py and look at what changed"
    )


def test_page_has_every_property_and_encoding(page):
    text = page.PAGE.read_text(encoding="utf-8")
    for name in PROPERTIES:
        assert f"**{name}**: whether" in text
    tables = text[: text.index("## Definitions")]
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (1 + len(SUBJECTS))


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "0"), (3e-14, "0"), (-1.498, "-1.5"), (float("inf"), "overflows")]
)
def test_show(page, number, text):
    assert page.show(number) == text
