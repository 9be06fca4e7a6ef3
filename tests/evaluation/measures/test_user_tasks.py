"""Test users' own lm-eval tasks from the command to the report."""

import json
import math

import numpy as np
import pytest
from helpers.commands import run_in_this_process
from helpers.evaluations import TINY
from helpers.schema import problems
from helpers.user_tasks import write_tasks
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from scipy.stats import sem, t
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.evaluation import RunRecord, RunStatistics
from rope_patch.statistics import accuracy, mcnemar
from rope_patch.utils import verify_checksum

pytestmark = pytest.mark.usefixtures("never_drawn")

CLUSTERS = [0, 0, 1, 1, 2, 2]  # two samples of my_lists share a text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    tasks, out = write_tasks(folder / "tasks"), folder / "out"
    arguments = ["--method", "none,linear", "--factor", "8", "--lengths", "64,512", "--out", out]
    arguments += ["--tasks", "my_lists,my_sums,my_pages", "--include-path", tasks]
    status, _, err = run_in_this_process("eval", TINY, *arguments)
    assert status == 0, err
    return out, verify_checksum((out / "report.json").read_bytes(), "report.json")


def test_samples_at_lengths_are_a_retrieval_task(run):
    _, results = run
    assert list(problems(results, RunRecord)) == []
    (record,) = results["retrieval"]
    assert (record["task"], record["lengths"]) == ("my_lists", [64, 512])
    stats = RunStatistics(results)
    plain, linear = stats.labels
    for label in stats.labels:
        rows = [row for row in record["samples"][label] if row["length"] == 512]
        assert len(rows) == 6
        scores = [row["score"] for row in rows]
        assert stats.accuracy(label, "my_lists", (512,)) == accuracy(scores, CLUSTERS)
        assert [row["depth"] for row in rows] == [50] * 6
    # Chance is taken off: one in four.
    (cell,) = stats._cells(plain, "my_lists", (64,))
    assert cell.chance == 0.25
    paired = stats.difference(linear, plain, "my_lists", (512,))
    scores = [
        [row["score"] for row in record["samples"][label] if row["length"] == 512]
        for label in (linear, plain)
    ]
    strata = [("my_lists", 512)] * 6
    assert paired == mcnemar(*scores, CLUSTERS, strata)


def test_other_scores_have_intervals_and_tests(run):
    _, results = run
    entries = {entry["task"]: entry for entry in results["harness"]}
    assert list(entries) == ["my_lists@64", "my_lists@512", "my_sums", "my_pages"]
    stats = RunStatistics(results)
    plain, linear = stats.labels
    scores = [entries["my_sums"]["metrics"][label]["acc"]["scores"] for label in (linear, plain)]
    interval, test = stats.harness(entries["my_sums"], "acc", linear)
    assert interval == accuracy(scores[0])
    assert test == mcnemar(*scores)
    assert stats.harness(entries["my_sums"], "acc", plain)[1] is None
    metrics = entries["my_lists@64"]["metrics"]
    scores = [metrics[label]["acc_norm"]["scores"] for label in (linear, plain)]
    interval, test = stats.harness(entries["my_lists@64"], "acc_norm", linear)
    assert interval == accuracy(scores[0], CLUSTERS)
    assert test == mcnemar(*scores, CLUSTERS)
    assert stats.harness(entries["my_pages"], "word_perplexity", plain) is None


def test_perplexities_have_intervals_over_documents(run):
    _, results = run
    (entry,) = [entry for entry in results["harness"] if entry["task"] == "my_pages"]
    stats = RunStatistics(results)
    plain, linear = stats.labels
    metrics = {label: entry["metrics"][label]["word_perplexity"] for label in stats.labels}
    interval, ratio = stats.harness_perplexity(entry, "word_perplexity", plain)
    assert ratio is None
    assert interval.estimate == pytest.approx(metrics[plain]["value"])
    assert (interval.n, interval.unit) == (3, "documents")
    interval, ratio = stats.harness_perplexity(entry, "word_perplexity", linear)
    # Student's t on the documents' differences, which weigh the same.
    losses = [np.array([n / w for n, w in metrics[m]["losses"]]) for m in (linear, plain)]
    differences = losses[0] - losses[1]
    expected = t.interval(0.95, 2, differences.mean(), sem(differences))
    assert ratio.estimate == pytest.approx(math.exp(differences.mean()))
    assert np.log([ratio.low, ratio.high]) == pytest.approx(expected)
    # Perplexity of lm-eval's `perplexity` is the same with weights of 1.
    (entry,) = [entry for entry in results["harness"] if entry["task"] == "my_sums"]
    interval, _ = stats.harness_perplexity(entry, "perplexity", plain)
    assert interval.estimate == pytest.approx(entry["metrics"][plain]["perplexity"]["value"])


def test_documents_are_read_in_windows_of_the_longest_length(run):
    _, results = run
    (entry,) = [entry for entry in results["harness"] if entry["task"] == "my_pages"]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=512, batch_size=1)
    pages = [f"page {i} of {i * i} " * 100 for i in range(3)]
    assert min(len(tokenizer(page).input_ids) for page in pages) > 512
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(page,), idx=0)
        for page in pages
    ]
    expected = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    losses = entry["metrics"][RunStatistics(results).plain]["word_perplexity"]["losses"]
    assert [-nats for nats, _ in losses] == pytest.approx(expected, rel=1e-6)


def test_the_report_shows_them_and_is_written_again(run, tmp_path):
    out, _ = run
    status, _, err = run_in_this_process("report", out, "--out", tmp_path / "again")
    assert (status, err) == (0, "")
    text = (tmp_path / "again" / "report.md").read_text()
    assert text == (out / "report.md").read_text()
    text = text.replace("\\_", "_")
    section = text.partition("<summary>Other tasks</summary>")[2].partition("</details>")[0]
    assert "my_sums" in section
    assert "word_perplexity" in section
    table = text.partition("<summary>Accuracy by task and length</summary>")[2].partition(
        "</details>"
    )[0]
    assert "my_lists" in table
    assert "--include-path" in json.loads((out / "report.json").read_text())["run"]["command"]
