"""Test two servers that are compared question by question."""

import json

import pytest
from helpers.commands import run_in_this_process
from helpers.evaluations import TEXT, TINY
from helpers.schema import problems
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation import RunRecord

ASKED = {
    "tasks": ["rp_recall_ll", "rp_short_cloze", "perplexity"],
    "lengths": [200, 900],
    "samples": 12,
    "texts": [TEXT],
    "perplexity_length": 448,
    "window": 32,
    "short_samples": 3,
    "verify": False,
}


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(TINY)


def test_servers_are_compared_question_by_question(make_server, plain, tmp_path):
    with make_server(model=plain).running() as first, make_server().running() as second:
        compared = rope_patch.compare_servers(first, second, TINY, out=tmp_path, **ASKED)
        again = rope_patch.compare_servers(first, second, TINY, out=tmp_path, **ASKED)
    results = compared.results
    assert list(problems(results, RunRecord)) == []
    assert again.results["retrieval"] == results["retrieval"]
    assert [method["label"] for method in results["methods"]] == ["A", "B"]
    assert {label: server["url"] for label, server in results["run"]["servers"].items()} == {
        "A": first,
        "B": second,
    }
    (entry,) = results["retrieval"]
    a, b = entry["samples"]["A"], entry["samples"]["B"]
    assert [row["prompt"] for row in a] == [row["prompt"] for row in b]
    # At 900 tokens, beyond the trained 256, YaRN recalls what the plain rotation does not.
    assert sum(x["log_likelihood"] > y["log_likelihood"] for x, y in zip(b, a, strict=True)) > 12
    assert compared.verdict.startswith("Server B: ")
    assert "at 900 tokens" in compared.verdict
    page = (tmp_path / "report.md").read_text().partition("How to read this")[0]
    assert "plain model" not in page
    assert f"| Server B | {second} |" in page
    for label, one in (("A", "a"), ("B", "b")):
        alone = json.loads((tmp_path / one / "report.json").read_text())
        assert alone["retrieval"][0]["samples"]["served"] == entry["samples"][label]


def test_a_server_compared_with_itself_is_told_apart_by_nothing(make_server, tmp_path):
    with make_server().running() as url:
        output = run_in_this_process(
            *("compare", url, url, "--tokenizer", TINY, "--no-verify", "--lengths", "200,448"),
            *("--tasks", "rp_recall_ll", "--samples", "8", "--per-text", "1", "--out", tmp_path),
        )
    assert output.returncode == 0, output.stderr
    told = " ".join(output.stdout.split())  # the terminal's lines end anywhere
    assert "With server B each right answer is exactly as likely as with server A." in told


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["http://a", "--tokenizer", TINY], "two addresses or one model"),
        ([TINY, "http://b", "--method", "yarn"], "two addresses or one model"),
        (["http://a", "http://b"], "--tokenizer MODEL"),
        (["http://a", "http://b", "--tokenizer", TINY, "--method", "yarn"], "--method goes with"),
        (["http://a", "http://b", "--tokenizer", TINY, "--factor", "2"], "rope-patch export"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, fact, tmp_path):
    output = run_in_this_process("compare", *words, "--out", tmp_path)
    assert output.returncode == 2
    assert fact in output.stderr
