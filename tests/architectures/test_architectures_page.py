"""Test that every architecture of transformers is patched or extended correctly, or refused.

The claims are in the files of measurements, which also compute docs/architectures.md.
"""

import json

import architectures_page as page
import mapped_measurements as maps
import pytest
import transformers
from architecture_measurements import measure
from architectures.encoding_measurements import measure_encoding
from architectures.text_models import text_model_types
from architectures.tiny_architectures import model_types
from kinds import kinds, slow_unless

MEASURED = json.loads(page.MEASURED.read_text())
MAPS = json.loads(page.MAPS.read_text())
ENCODINGS = json.loads(page.ENCODINGS.read_text())
INSTALLED_ROWS = MEASURED.get(transformers.__version__)
NEWEST = max(MEASURED, key=page.version_key)
# And those that most users run.
QUICK = {*kinds(MEASURED[NEWEST]), "llama", "qwen3", "gemma3_text", "phi3", "llama4_text"}

# One of each way to keep positions, and of each reason for a refusal; all others are slow tests.
QUICK_ENCODINGS = {
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
}


# -- rotations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", slow_unless(model_types(), QUICK))
def test_architecture_is_patched_or_refused_as_on_the_page(model_type):
    row = measure(model_type).to_dict()  # asserts frequencies, logits and undo
    del row["model_type"]
    if INSTALLED_ROWS is None:
        assert row["static"] == "patched" or ":" in row["static"] or row["static"].startswith("no ")
    elif not INSTALLED_ROWS[model_type]["static"].startswith("not built"):  # needs other packages
        assert row == INSTALLED_ROWS[model_type]


# -- encoders and other encodings ------------------------------------------------------------------


def encoding_types():
    """Return the installed release's encodings; to compute them, all its configs are imported."""
    return sorted(ENCODINGS.get(transformers.__version__) or computed_encoding_types())


def computed_encoding_types():
    rows = INSTALLED_ROWS or {}
    return [t for t in text_model_types() if rows.get(t, {}).get("static") != "patched"]


@pytest.mark.parametrize("model_type", slow_unless(encoding_types(), QUICK_ENCODINGS))
def test_encoding_is_extended_or_refused_as_on_the_page(model_type):
    row = measure_encoding(model_type).to_dict()  # asserts logits, tables and undo
    stored = ENCODINGS.get(transformers.__version__, {}).get(model_type)
    if stored is None:
        assert row["result"] == "extended" or ":" in row["result"]
    elif not stored["result"].startswith("not built"):
        assert row == stored


# -- the page --------------------------------------------------------------------------------------


def test_page_matches_the_measurements():
    assert page.PAGE.read_text() == page.render(MEASURED, MAPS, ENCODINGS)


def test_every_architecture_encoding_flag_and_map_has_a_row():
    assert encoding_types() == sorted(computed_encoding_types())
    patched = maps.mapped_names(MEASURED[NEWEST])
    assert list(MAPS[NEWEST]) == sorted(patched)
    assert set(maps.FLAGS) <= set(patched)
    for row in MAPS[NEWEST].values():
        assert set(row) == {"attentions", *maps.MAPS}


def test_most_are_patched_mapped_and_extended_and_all_refusals_have_a_reason():
    known = {"", "patched", "extended", "no rotary embedding"}
    for rows in MEASURED.values():
        assert sum(row["static"] == "patched" for row in rows.values()) >= 80
    assert sum(row["self-extend"] == "patched" for row in MAPS[NEWEST].values()) >= 100
    rows = ENCODINGS[max(ENCODINGS, key=page.version_key)].values()
    assert sum(row["result"] == "extended" for row in rows) >= 80
    statuses = {row["result"] for row in rows}
    for version in MEASURED.values():
        statuses |= {row[key] for row in version.values() for key in ("static", "dynamic")}
    for version in MAPS.values():
        statuses |= {row[method] for row in version.values() for method in maps.MAPS}
    for status in statuses - known:
        assert status.startswith("not built: ") or len(status) > len("refused: ") + 30, status


def test_page_counts_the_rows_that_it_shows():
    heads, _, *rows = [line for line in page.PAGE.read_text().splitlines() if line[:2] == "| "]
    columns = heads.strip("| ").split(" | ")
    for version, measured in MEASURED.items():
        column = columns.index(f"patched, {version}")
        shown = [row.split(" | ")[column] for row in rows if row.count("|") == heads.count("|")]
        assert shown.count("yes") == sum(row["static"] == "patched" for row in measured.values())


def test_supported_numbers_are_those_of_the_page():
    patched = {
        version: {name for name, row in rows.items() if row["static"] == "patched"}
        for version, rows in MEASURED.items()
    }
    mapped = {name for name, row in MAPS[NEWEST].items() if row["self-extend"] == "patched"}
    text = (page.PAGE.parent / "support.md").read_text()
    counts = len(patched[NEWEST]), len(patched["5.0.0"]), len(mapped & set(MEASURED[NEWEST]))
    assert f"[{counts[0]} architectures](architectures.md) of transformers" in text
    assert f"{counts[1]} of 5.0, each tested" in text
    assert f"| position maps | [{counts[2]} architectures](architectures.md)" in text
