"""Test that docs/conformance.md equals the script's output."""

import hf_rotation
import page
import pytest

import rope_patch


@pytest.mark.skipif(not hf_rotation.has("proportional"), reason="transformers has no proportional")
def test_page_is_up_to_date():
    assert page.PAGE.read_text(encoding="utf-8") == page.build(), (
        "docs/conformance.md is not what the code computes: run "
        "python tests/conformance/page.py and look at what changed"
    )


def test_page_has_every_method():
    text = page.PAGE.read_text(encoding="utf-8")
    for method in rope_patch.list_methods():
        assert f"| `{method}` |" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0 %"), (0.003306, "0.331 %"), (0.42284, "42.3 %"), (1.0000001, "100 %"),
     (2.9999999, "× 4"), (30.54, "× 31.5")],
)  # fmt: skip
def test_percent(number, text):
    assert page.percent(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "1e-12"), (3e-7, "2e-6"), (3e-6, "3e-6"), (0.25, "0.25")]
)
def test_bound(number, text):
    assert page.bound(number) == text
