"""Test evaluations of vLLM's and llama.cpp's servers, against the same model in this process."""

import json
import logging

import pytest
import servers
from helpers.commands import run_in_this_process
from servers import LONGEST, TINY, YARN

import rope_patch

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TEXT = str(servers.ASSETS / "start-of-emma.txt")
WRITTEN = ["rp_recall"]
SCORED = ["rp_recall_ll", "rp_recall_mc", "rp_short_cloze", "perplexity"]
SIZES = {"lengths": [200, 448, 900], "samples": 4, "per_text": 2, "short_samples": 6}
TEXTS = {"texts": [TEXT], "perplexity_length": 448, "window": 32, "control_context": 128}
# YaRN as llama.cpp spells it: its files' own keys are not those of a config.
LLAMA_CPP_YARN = {
    "rope_scaling_type": "yarn",
    "rope_freq_scale": 1 / 4,
    "yarn_orig_ctx": 256,
    "yarn_ext_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
NATS = 0.01  # float32 in two engines: some thousandths of a nat on whole answers


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the results of the same model in this process, with YaRN."""
    options = {**SIZES, **TEXTS, "tasks": [*WRITTEN, *SCORED], "factor": 4}
    folder = tmp_path_factory.mktemp("in-process")
    return rope_patch.evaluate(TINY, ["yarn"], out=folder, **options).results


def rows(results):
    (label,) = (method["label"] for method in results["methods"])
    return {entry["task"]: entry["samples"][label] for entry in results["retrieval"]}


def require_equal_scores(results, expected):
    for task, samples in rows(results).items():
        others = rows(expected)[task]
        assert [row["prompt"] for row in samples] == [row["prompt"] for row in others]
        assert [row["score"] for row in samples] == [row["score"] for row in others], task


def test_vllm(tmp_path, expected):
    pytest.importorskip("vllm")
    log, out = tmp_path / "log.txt", tmp_path / "out"
    options = {**SIZES, **TEXTS, "tasks": [*WRITTEN, *SCORED], "out": out}
    with servers.vllm(TINY, YARN, log, with_tokenizer=True) as url:
        results = rope_patch.evaluate_server(url, TINY, **options).results
        with pytest.raises(ValueError, match=f"takes {LONGEST:,} tokens at most"):
            rope_patch.evaluate_server(url, TINY, **{**options, "lengths": [2 * LONGEST]})
    server = results["run"]["server"]
    print(server)
    assert server["engine"].startswith("vllm 0.")
    assert server["verification"]["explains"] == ["yarn-4"]
    assert results["run"]["not_run"] == []
    require_equal_scores(results, expected)
    for task, samples in rows(results).items():
        assert [row["log_likelihood"] for row in samples] == pytest.approx(
            [row["log_likelihood"] for row in rows(expected)[task]], abs=NATS
        )
    (losses,) = results["perplexity"]["losses"]["served"]
    assert losses == pytest.approx(expected["perplexity"]["losses"]["yarn ×4"][0], abs=NATS)
    assert results["short"][0]["samples"]["served"] == expected["short"][0]["samples"]["yarn ×4"]


def test_the_plugin_answers_as_the_method_in_this_process(tmp_path):
    """In one report, question by question; and `verify` knows how the plugin rotates."""
    pytest.importorskip("vllm")
    options = {**SIZES, **TEXTS, "tasks": [*WRITTEN, *SCORED]}
    here, served, both = tmp_path / "here", tmp_path / "served", tmp_path / "both"
    rope_patch.evaluate(TINY, ["none", "dynamic-yarn"], factor=4, out=here, **options)
    patched = rope_patch.load(str(TINY), "dynamic-yarn", factor=4)
    rope_patch.save(patched, tmp_path / "patched")
    asked = {**YARN, "rope_type": "dynamic-yarn"}
    with servers.vllm(
        TINY, asked, tmp_path / "log.txt", with_tokenizer=True, by_plugin=True
    ) as url:
        results = rope_patch.evaluate_server(
            url, TINY, out=served, against=tmp_path / "patched", **options
        ).results
    assert results["run"]["server"]["verification"]["explains"] == ["by-request"]
    assert results["run"]["server"]["rotates_as_asked"]
    words = ["report", here, "--served", f"vllm={served}", "--out", both]
    output = run_in_this_process(*words)
    assert output.returncode == 0, output.stderr
    page = (both / "report.md").read_text()
    print(page.partition("## Question by question")[2].partition("\n## ")[0])
    assert "server vllm is closest to dynamic-yarn: 36 of 36 scores are the same" in page
    for entry in json.loads((both / "report.json").read_text())["retrieval"]:
        mine, other = entry["samples"]["dynamic-yarn"], entry["samples"]["vllm"]
        assert [row["log_likelihood"] for row in mine] == pytest.approx(
            [row["log_likelihood"] for row in other], abs=NATS
        )


def test_vllm_without_a_tokenizer_scores_by_its_own_field(tmp_path, expected):
    pytest.importorskip("vllm")
    options = {**SIZES, "tasks": ["rp_recall_ll"], "out": tmp_path / "out", "verify": False}
    with servers.vllm(TINY, YARN, tmp_path / "log.txt") as url:
        results = rope_patch.evaluate_server(url, TINY, **options).results
    require_equal_scores(results, expected)


def test_llama_cpp_writes_and_has_no_likelihoods(tmp_path, expected, caplog):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    from helpers.tiny_gguf import write_gguf

    write_gguf(TINY, tmp_path / "tiny.gguf", LONGEST, with_tokenizer=True)
    options = {**SIZES, "out": tmp_path / "out", "tasks": WRITTEN, "concurrency": 2}
    with (
        servers.llama_cpp(tmp_path / "tiny.gguf", LLAMA_CPP_YARN, tmp_path / "log.txt") as url,
        caplog.at_level(logging.INFO),
    ):
        with pytest.raises(ValueError, match=r"^rp_recall_ll, rp_recall_mc, rp_short_cloze, perpl"):
            rope_patch.evaluate_server(url, TINY, **{**options, "tasks": [*WRITTEN, *SCORED]})
        results = rope_patch.evaluate_server(url, TINY, **options).results
    server = results["run"]["server"]
    print(server)
    assert server["engine"].startswith("llama.cpp")
    assert server["max_length"] == LONGEST
    assert server["verification"]["explains"] == ["yarn-4"]
    require_equal_scores(results, expected)
    assert {row["log_likelihood"] for row in rows(results)["rp_recall"]} == {None}
