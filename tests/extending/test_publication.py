"""Test the exports beside a published model, and the folder of a publication that fails."""

import json

import pytest
from extensions import LENGTH, TINY
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.exporting import ENGINES
from rope_patch.extending import publication
from rope_patch.extending.candidates import Candidate
from rope_patch.extending.request import ExtendRequest
from rope_patch.pretrained.patched_checkpoint import patch_checkpoint


def parsed(arguments):
    """Return a command line's words, JSON among them as data: the order of keys is free."""
    return [json.loads(word) if word.startswith("{") else word for word in arguments]


@pytest.mark.parametrize(
    ("method", "engines"),
    [("yarn", set(ENGINES)), ("dynamic-yarn", {"vllm"}), ("rerope", set())],
)
def test_exports_are_those_of_the_patched_model(tmp_path, method, engines):
    folder = tmp_path / "model"
    patch_checkpoint(TINY, folder, method, length=LENGTH)
    publication.write_exports(folder)
    assert {path.stem for path in (folder / "exports").glob("*.json")} == engines
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(model, method, length=LENGTH)
    page = (folder / "exports" / "README.md").read_text()
    for engine in ENGINES:
        section = page.split(f"## {engine}\n")[1].split("\n## ")[0]
        if engine in engines:
            written = json.loads((folder / "exports" / f"{engine}.json").read_text())
            if engine in ("llama.cpp", "mlx"):
                continue  # their lines depend on which config was converted
            expected = rope_patch.export(model, engine)
            assert written["config"] == expected.config
            assert parsed(written["arguments"]) == parsed(expected.arguments)
        else:
            assert section.strip().startswith("Not from this folder: ")
    if "vllm" in engines:
        assert "`vllm serve . --hf-overrides" in page


def test_a_publication_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    request = ExtendRequest(model=TINY, to="4x", out=tmp_path, budget=10.0)
    report = tmp_path / "report"
    report.mkdir()

    def fail(*_):
        raise RuntimeError("stopped")

    monkeypatch.setattr(publication, "render_card", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        publication.publish(request, Candidate("yarn"), LENGTH, report, {})
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
