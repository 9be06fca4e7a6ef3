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

MAPS = json.loads(page.MAPS.read_text())
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
        assert row == stored


def encoding_types():
    """Return the installed release's encodings; to compute them, all its configs are imported."""
    return sorted(ENCODINGS.get(transformers.__version__) or computed_encoding_types())


def computed_encoding_types():
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


def test_every_encoding_has_a_row():
    assert encoding_types() == sorted(computed_encoding_types())


def test_page_matches_the_measurements():
    assert page.PAGE.read_text() == page.render(MEASURED, MAPS, ENCODINGS)


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
            for status in (row["static"], row["dynamic"]):
                is_known = status in ("", "patched", "no rotary embedding")
                assert (
                    is_known
                    or status.startswith("not built: ")
                    or len(status) > len("refused: ") + 30
                )


def test_refusals_of_maps_have_a_reason():
    for rows in MAPS.values():
        for row in rows.values():
            for method in row.keys() - {"attentions"}:
                status = row[method]
                assert status == "patched" or len(status) > len("refused: ") + 30


def test_page_counts_the_rows_that_it_shows():
    heads, _, *rows = [line for line in page.PAGE.read_text().splitlines() if line[:2] == "| "]
    columns = heads.strip("| ").split(" | ")
    for version, measured in MEASURED.items():
        column = columns.index(f"patched, {version}")
        shown = [row.split(" | ")[column] for row in rows if row.count("|") == heads.count("|")]
        assert shown.count("yes") == sum(row["static"] == "patched" for row in measured.values())


def test_readme_has_the_numbers_of_the_page():
    newest, *_ = versions = sorted(MEASURED, key=page.version_key, reverse=True)
    patched = {v: sum(row["static"] == "patched" for row in MEASURED[v].values()) for v in versions}
    mapped = [
        name
        for name, row in MAPS[newest].items()
        if name in MEASURED[newest] and row["self-extend"] == "patched"
    ]
    text = (page.PAGE.parents[1] / "README.md").read_text()
    assert f"[{patched[newest]} architectures](docs/architectures.md) of transformers" in text
    assert f"{patched['5.0.0']} of 5.0, each tested" in text
    assert f"| position maps | [{len(mapped)} architectures](docs/architectures.md)" in text
