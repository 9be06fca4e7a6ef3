"""Test the exports of checkpoints that people run, and the page's table of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from roundtrip import assert_same_rotation
from test_engine_fields import load_generator

from rope_patch.exporting import Export
from rope_patch.exporting.target import Target

generator = load_generator("export_table")
pytestmark = pytest.mark.skipif(
    generator.missing_families() != (), reason="some of the checkpoints are newer than transformers"
)
# Gemma 4's layers have heads of several sizes, which the restated engines do not know.
RESTATED = [name for name in generator.FAMILIES if name not in ("Gemma 4", "Phi-3.5-MoE")]


def flat(export, config):
    """Return an export with the fields of the text config alone, also on its command line."""
    text = config.get_text_config(decoder=True)
    if text is config or not export.config:
        return export
    (fields,) = export.config.values()
    return replace(export, config=fields)


@pytest.mark.parametrize("asked", generator.ASKED)
@pytest.mark.parametrize("family", RESTATED)
def test_engines_rotate_as_asked(family, asked):
    """Compare what each engine makes of an export, restated in float64, with the model."""
    exports = generator.exports(family, asked)
    found = {e: x for e, x in exports.items() if isinstance(x, Export) and not x.needs_plugin}
    model = generator.make_model(family, asked) if found else None
    for engine, export in found.items():
        target = Target.from_model(model)
        frequencies = {kind: r.frequencies for kind, r in target.rotations.items()}
        original = generator.make_config(family).get_text_config(decoder=True)
        exported = flat(export, target.config)
        if engine == "transformers":  # the generator compares
            continue
        unpatched = SimpleNamespace(frequencies=frequencies)
        assert_same_rotation(original, model, unpatched, exported, loose=True)


def test_the_page_has_the_table():
    """Compare with docs/generate/export_table.py: `python docs/generate/export_table.py`."""
    assert generator.FIRST + generator.table() + generator.LAST in generator.PAGE.read_text()


def test_every_run_is_of_an_export():
    """A case that engines were run with is exported, under a name of the table."""
    for engine, record in generator.verified().items():
        for case in record["cases"]:
            family, _, asked = case.rpartition(", ")
            assert isinstance(generator.exports(family, asked)[engine], Export), case
