"""Test engines of installed packages, and methods from outside in all engines."""

import pytest
from helpers.plugins import install, write_method
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.exporting import ENGINES
from rope_patch.methods import load_plugin

pytestmark = pytest.mark.usefixtures("own_registry")
GROUP = "rope_patch.engines"
SOURCE = """
from rope_patch.exporting import Export, Target

NAME = "outside-engine"


def export(target: Target) -> Export:
    target.require_static(NAME)
    frequencies = target.rotations[None].frequencies
    return Export(engine=NAME, config={"inv_freq": frequencies.inv_freq.tolist()})
"""


@pytest.fixture
def patched(tmp_path):
    model = make_model()
    load_plugin(str(write_method(tmp_path / "mine.py")))
    rope_patch.patch(model, "outside", factor=4)
    return model


STRETCH = [1.0] * 4 + [4.0] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_get_the_stretch_of_each_pair(engine, patched):
    exported = rope_patch.export(patched, engine)
    if exported.tensors:  # llama.cpp
        (stretch,) = exported.tensors.values()
    else:
        fields = exported.config.get("rope_parameters") or exported.config["rope_scaling"]
        stretch = fields["long_factor"]
    assert stretch == pytest.approx(STRETCH, rel=1e-12)


def test_an_installed_package_adds_an_engine(patched, tmp_path, monkeypatch):
    install(tmp_path, "outside_engine", SOURCE, GROUP, "outside-engine")
    monkeypatch.syspath_prepend(tmp_path)
    exported = rope_patch.export(patched, "outside-engine")
    expected = [1e4 ** (-i / 8) / stretch for i, stretch in enumerate(STRETCH)]
    assert exported.config["inv_freq"] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(rope_patch.Refused, match=r"mlx, axolotl, llama-factory, outside-engine$"):
        rope_patch.export(patched, "no-such-one")
    rope_patch.unpatch(patched)
    rope_patch.patch(patched, "dynamic-yarn")
    with pytest.raises(rope_patch.Refused, match="outside-engine cannot run dynamic-yarn"):
        rope_patch.export(patched, "outside-engine")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "failed: ZeroDivisionError"),
        ("NAME = 'other'\ndef export(target): ...", "got NAME = 'other'"),
        ("NAME = 'outside-engine'", "and export = None"),
        ("NAME = 'outside-engine'\ndef export(target): return {}", "must return .*got dict"),
    ],
)
def test_broken_engines_are_named(patched, tmp_path, monkeypatch, source, message):
    module = f"broken_engine_{abs(hash(source))}"
    install(tmp_path, module, source, GROUP, "outside-engine")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        rope_patch.Refused, match=f"(?s)broken-engine.*rope_patch.engines.*{message}"
    ):
        rope_patch.export(patched, "outside-engine")
    assert rope_patch.export(patched, "vllm").arguments
