"""Test `--for`: only methods that the named engines run are measured and recommended."""

from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from helpers.search_fixtures import TRAINED, questions, write_samples

import rope_patch

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")
LENGTH = 1024  # four times the trained length, where the plain model fails


@pytest.fixture(scope="module")
def for_vllm(model):
    return rope_patch.recommend(
        model,
        length=LENGTH,
        budget=10,
        samples=questions(LENGTH, 6, seed=1) + questions(TRAINED, 6, seed=2),
        most=6,
        progress=False,
        engines=("vllm", "llama.cpp"),
    )


def runs_in(model, name, engine):
    """Return whether an engine is exported to without the plugin, by `rope_patch.export` alone."""
    with rope_patch.patch(model, name, length=LENGTH):
        try:
            return not rope_patch.export(model, engine).needs_plugin
        except rope_patch.Refused:
            return False


def test_what_an_engine_cannot_run_is_neither_measured_nor_recommended(for_vllm, model):
    assert for_vllm.outcome == "use"
    for row in for_vllm.rows:
        if row["method"] is not None:
            runs = all(runs_in(model, row["method"], each) for each in ("vllm", "llama.cpp"))
            assert (row["long"] is not None) == runs, row["name"]
            assert ("does not run in" in row["status"]) != runs
    assert {"dynamic-yarn", "self-extend"} <= {
        row["name"] for row in for_vllm.rows if "does not run in vllm" in row["status"]
    }
    assert for_vllm.method in ("yarn", "ntk-by-parts", "ntk", "llama3", "linear")


def test_a_line_names_what_would_run_elsewhere_and_what_to_type(for_vllm):
    assert "vllm or llama.cpp cannot run" in for_vllm.elsewhere
    assert "\n" not in for_vllm.elsewhere
    twin = {"ntk": "dynamic"}.get(for_vllm.method, f"dynamic-{for_vllm.method}")
    assert f"{twin} rotates as {for_vllm.method} at the length" in for_vllm.elsewhere
    assert for_vllm.elsewhere in str(for_vllm)
    first, second = for_vllm.shell.splitlines()
    assert "--engine vllm" in first
    assert "--engine llama.cpp" in second
    for line in (first, second):
        assert f"  {line}\n" in str(for_vllm)


def test_an_engine_that_runs_nothing_is_refused_with_its_reason(model):
    config = type(model.config).from_dict(model.config.to_dict())
    config.model_type = "unheard-of"
    other = type(model)(config)
    with pytest.raises(rope_patch.Refused, match=r"no method .* runs in mlx: .*unheard-of"):
        rope_patch.recommend(
            other, length=LENGTH, budget=1, samples=questions(LENGTH, 6), engines=["mlx"]
        )


def test_engines_come_by_commas_and_typos_are_named(tmp_path):
    samples = write_samples(
        tmp_path / "samples.jsonl", questions(512, 6, seed=3) + questions(256, 6, seed=2)
    )
    words = [TINY, "--length", 512, "--minutes", 10, "--samples", samples, "--out", tmp_path / "o"]
    wrong = run_in_this_process("recommend", *words, "--for", "vllm,lama.cpp")
    assert wrong.returncode == 1
    assert "unknown engine 'lama.cpp' (did you mean 'llama.cpp'?)" in wrong.stderr
    assert not (tmp_path / "o").exists()
