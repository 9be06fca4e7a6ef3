"""Test that every architecture of transformers is patched correctly, or refused with a reason."""

import json

import architectures_page as page
import pytest
import transformers
from architecture_measurements import measure
from architectures.encoding_measurements import measure_encoding
from architectures.text_models import text_model_types
from architectures.tiny_architectures import model_types

MEASURED = json.loads(page.MEASURED.read_text())
INSTALLED_ROWS = MEASURED.get(transformers.__version__)

ENCODINGS = json.loads(page.ENCODINGS.read_text())
# One of each way to keep positions, and of each reason for a refusal; all others are slow tests.
QUICK = (
    "bert",
    "clip",
    "ctrl",
    "deberta",
    "falcon, alibi",
    "gpt_neo",
    "ibert",
    "jamba",
    "led",
    "lilt",
    "longformer",
    "longt5, transient-global",
    "luke",
    "m2m_100",
    "modernbert",
    "mra",
    "musicgen",
    "openai-gpt",
    "pegasus_x",
    "prophetnet",
    "roformer",
    "speech_to_text",
    "udop",
    "whisper",
    "xlnet",
)

# Architectures whose smallest models are still large.
LARGE = ("dots3_note_text", "hrm_text")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=pytest.mark.slow) if t in LARGE else t for t in model_types()],
)
def test_architecture_is_patched_or_refused_as_on_the_page(model_type):
    row = measure(model_type).to_dict()  # asserts frequencies, logits and undo
    del row["model_type"]
    if INSTALLED_ROWS is None:
        assert row["static"] == "patched" or ":" in row["static"] or row["static"].startswith("no ")
    elif not INSTALLED_ROWS[model_type]["static"].startswith("not built"):  # needs other packages
        stored = INSTALLED_ROWS[model_type]
        assert {name: row[name] for name in stored} == stored  # old rows have fewer columns


def encoding_types():
    rows = INSTALLED_ROWS or {}
    return [t for t in text_model_types() if rows.get(t, {}).get("static") != "patched"]


@pytest.mark.parametrize(
    "model_type",
    [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in encoding_types()],
)
def test_encoding_is_extended_or_refused_as_on_the_page(model_type):
    row = measure_encoding(model_type).to_dict()  # asserts logits, tables and undo
    stored = ENCODINGS.get(transformers.__version__, {}).get(model_type)
    if stored is None:
        assert row["result"] == "extended" or ":" in row["result"]
    elif not stored["result"].startswith("not built"):
        assert row == stored


def test_page_matches_the_measurements():
    assert page.PAGE.read_text() == page.render(MEASURED, ENCODINGS)


def test_most_encodings_are_extended_and_all_refusals_have_a_reason():
    rows = ENCODINGS[max(ENCODINGS)].values()
    assert sum(row["result"] == "extended" for row in rows) >= 80
    for row in rows:
        assert row["result"] == "extended" or len(row["result"]) > len("refused: ") + 30


@pytest.mark.parametrize("version", sorted(MEASURED))
def test_at_least_80_architectures_are_patched(version):
    rows = MEASURED[version].values()
    assert sum(row["static"] == "patched" for row in rows) >= 80


def test_refusals_have_a_reason():
    for rows in MEASURED.values():
        for row in rows.values():
            for status in (row["static"], row["dynamic"], row.get("mapped", "")):
                is_known = status in ("", "patched", "no rotary embedding")
                assert (
                    is_known
                    or status.startswith("not built: ")
                    or len(status) > len("refused: ") + 30
                )
