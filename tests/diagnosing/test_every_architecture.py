"""No false alarm: of every architecture with RoPE, as its config is by default."""

import pytest
from architectures.tiny_architectures import model_types, tiny_config

import rope_patch

# Their default configs shrink to lengths that no longer go with their factor of 32.
SHRUNK = {"gpt_oss": "factor-and-lengths", "ministral3": "factor-and-lengths"}


@pytest.fixture(scope="module")
def diagnoses():
    found = {}
    for name in model_types():
        try:
            config = tiny_config(name)
        except (ValueError, TypeError):
            continue
        except Exception as error:  # transformers' own validation has an error class of its own
            if "Strict" not in type(error).__name__:
                raise
            continue
        if getattr(config.get_text_config(decoder=True), "rope_parameters", None):
            try:
                found[name] = rope_patch.diagnose(config)
            except ValueError as error:  # what `patch` refuses, too
                found[name] = str(error)
    return found


def test_most_are_read(diagnoses):
    refused = {name: said for name, said in diagnoses.items() if isinstance(said, str)}
    assert len(diagnoses) - len(refused) >= 80
    assert len(refused) <= 3, refused


def test_none_is_said_to_do_otherwise_than_its_config(diagnoses):
    alarms = {
        name: [f.code for f in said.findings if f.severity != "note" and f.code != SHRUNK.get(name)]
        for name, said in diagnoses.items()
        if not isinstance(said, str)
    }
    assert {name: codes for name, codes in alarms.items() if codes} == {}
