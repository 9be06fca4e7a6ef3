"""Every architecture of transformers is patched as the method says, or refused with the reason."""

import json

import architectures_page as page
import pytest
import transformers
from architecture_measurements import measure
from architectures.tiny_architectures import model_types

MEASURED = json.loads(page.MEASURED.read_text())
HERE = MEASURED.get(transformers.__version__)


# Whose smallest models are still large.
LARGE = ("dots3_note_text", "hrm_text")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=pytest.mark.slow) if t in LARGE else t for t in model_types()],
)
def test_patched_or_refused_as_the_page_says(model_type):
    row = measure(model_type).to_dict()  # checks frequencies, logits and undoing by itself
    del row["model_type"]
    if HERE is None:
        assert row["static"] == "patched" or ":" in row["static"] or row["static"].startswith("no ")
    elif not HERE[model_type]["static"].startswith("not built"):  # those say what is installed
        assert row == HERE[model_type]


def test_the_page_is_what_was_measured():
    assert page.PAGE.read_text() == page.render(MEASURED)


@pytest.mark.parametrize("version", sorted(MEASURED))
def test_at_least_eighty_architectures(version):
    rows = MEASURED[version].values()
    assert sum(row["static"] == "patched" for row in rows) >= 80


def test_nothing_is_refused_without_a_reason():
    for rows in MEASURED.values():
        for row in rows.values():
            for said in (row["static"], row["dynamic"]):
                known = said in ("", "patched", "no rotary embedding")
                assert known or said.startswith("not built: ") or len(said) > len("refused: ") + 30
