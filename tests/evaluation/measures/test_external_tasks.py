"""Test lm-eval's own and users' tasks: their index, loading and scores, offline."""

import math
import sys
from pathlib import Path

import pytest
import requests
from helpers.built_tasks import ruler_modules
from helpers.user_tasks import write_tasks
from lm_eval.api.metrics import mean_stderr
from lm_eval.models.huggingface import HFLM

from rope_patch.evaluation import ExternalResults, ExternalTask, LongContextLM, TaskIndex
from rope_patch.evaluation.measures import external_tasks

LLAMA = str(Path(__file__).parents[2] / "assets" / "tiny-llama")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail if a task builder contacts a server."""
    import nltk

    def fail(*_, **__):
        pytest.fail("the network was asked")

    monkeypatch.setattr(nltk, "download", fail)
    monkeypatch.setattr(requests, "get", fail)


@pytest.fixture(scope="module", autouse=True)
def few_keys():
    with ruler_modules([f"noun{i}" for i in range(99)], ["big", "small"]):
        yield


@pytest.fixture
def lm(trained_llama, tokenizer):
    return LongContextLM(trained_llama, tokenizer, 10**9, {"model": "tiny"})


@pytest.fixture(scope="module")
def single(few_keys):
    """Load a task of RULER at two lengths."""
    return external_tasks.load(["niah_single_1"], [512, 1024], LLAMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("user") / "tasks")


def load_own(folder, *names):
    return external_tasks.load(list(names), [64, 96], LLAMA, (folder,))


# -- lm-eval's own ---------------------------------------------------------------------------------


def test_a_task_is_loaded_once_for_each_length(single):
    assert [external.label for external in single] == ["niah_single_1@512", "niah_single_1@1024"]
    for external, length in zip(single, (512, 1024), strict=True):
        docs = list(external.task.eval_docs)
        assert len(docs) == 500
        assert {doc["max_length"] for doc in docs} == {length}
        assert all(length // 2 < doc["length"] <= length for doc in docs)


def test_a_limit_applies_to_each_length_whose_answers_are_scored(single, lm, monkeypatch):
    asked, outcomes = [], iter([True, False] * 2)

    def generate(requests, disable_tqdm=False):
        asked.append([request.doc["max_length"] for request in requests])
        return [request.doc["outputs"][0] if next(outcomes) else "no" for request in requests]

    monkeypatch.setattr(lm, "generate_until", generate)
    results = [external_tasks.evaluate(lm, external, limit=2) for external in single]
    assert asked == [[512, 512], [1024, 1024]]
    # Metrics of other lengths, which are -1, are dropped, and this length's are the samples'.
    assert [result.metrics for result in results] == [{}, {}]
    for result, length in zip(results, (512, 1024), strict=True):
        assert [row["score"] for row in result.samples] == [1.0, 0.0]
        assert [row["text"] for row in result.samples] == [0, 1]  # no two share one
        assert [row["length"] for row in result.samples] == [length] * 2
        ids = [f"niah_single_1@{length}/{number}" for number in range(2)]
        assert [row["id"] for row in result.samples] == ids


def test_missing_data_in_a_group_or_tag_names_the_task(monkeypatch):
    names = []
    load_with = external_tasks._load_with

    def load_first_alone(manager, name, root=None):
        names.append(name)
        return {} if "1" in name else load_with(manager, name)

    monkeypatch.setattr(external_tasks, "_load_with", load_first_alone)
    with pytest.raises(ValueError, match=r"'niah_single_2' cannot be had.*HF_HUB_OFFLINE"):
        external_tasks.load(["ruler"], [1024], LLAMA)
    assert names == ["niah_single_1", "niah_single_2"]


@pytest.mark.parametrize(
    ("name", "length", "fact"),
    [
        ("ruler_qa_squad", 1024, r"rajpurkar\.github\.io.* was not asked"),
        ("ruler_vt", 512, r"512 tokens.*rp_vt"),  # its builder would never end
        ("ruler_cwe", 512, "ruler_cwe makes samples without an answer"),
        ("babilong_qa1", 4096, r"'babilong_qa1' cannot be had: .*unset HF_HUB_OFFLINE"),
        ("arc_easy", 4096, r"'arc_easy' cannot be had: .*unset HF_HUB_OFFLINE"),
        ("longbench_2wikimqa", 4096, r"'longbench_2wikimqa' (needs a package|cannot be had)"),
    ],
)
def test_what_cannot_be_built_is_refused(name, length, fact):
    with pytest.raises(ValueError, match=fact):
        external_tasks.load([name], [length], LLAMA)


def test_network_timeouts_are_undone():
    before = sys.modules["nltk"].download, requests.get
    with external_tasks._network_timeouts():
        assert sys.modules["nltk"].download is not before[0]
    assert (sys.modules["nltk"].download, requests.get) == before


# -- generation ------------------------------------------------------------------------------------


def generating(folder, settings):
    """Return a user's folder with one task that generates answers."""
    folder.mkdir()
    (folder / "builder.py").write_text(
        "from datasets import Dataset\n\n\ndef sums(**_):\n"
        "    rows = [{'question': f'{i} and {i} are', 'answer': 'many'} for i in range(4)]\n"
        "    return {'test': Dataset.from_list(rows)}\n"
    )
    (folder / "sums.yaml").write_text(
        "task: sums\ndataset_path: ''\ntest_split: test\n"
        "custom_dataset: !function builder.sums\noutput_type: generate_until\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        f"generation_kwargs: {{until: ['.'], max_gen_toks: 3, {settings}}}\n"
        "metric_list: [{metric: exact_match}]\nmetadata: {version: 1.0}\n"
    )
    return str(folder)


def test_a_temperature_without_sampling_is_ignored(lm, tmp_path):
    # LongBench's tasks have these settings.
    folder = generating(tmp_path / "tasks", "do_sample: false, temperature: 1")
    (external,) = load_own(folder, "sums")
    result = external_tasks.evaluate(lm, external, None)
    assert len(result.metrics["exact_match"].pop("prompts")) == 32
    assert result.metrics["exact_match"] == {"value": 0.0, "stderr": None, "scores": [0.0] * 4}


@pytest.mark.parametrize("settings", ["do_sample: true", "temperature: 0.7"])
def test_sampling_is_refused_when_tasks_are_loaded(settings, tmp_path):
    with pytest.raises(ValueError, match="'sums' samples its answers"):
        load_own(generating(tmp_path / "tasks", settings), "sums")


# -- users' tasks ----------------------------------------------------------------------------------


def test_tasks_that_take_a_length_are_built_once_for_each(folder):
    assert load_own(folder) == []
    loaded = load_own(folder, "my_tag", "my_group")
    labels = ["my_lists@64", "my_lists@96", "my_sums", "my_pages"]
    assert [external.label for external in loaded] == labels
    sizes = [len(external.task.eval_docs[0]["input"].split()) for external in loaded[:2]]
    assert sizes == [2 + 2 * (64 // 16), 2 + 2 * (96 // 16)]


def test_scores_are_lm_evals_of_each_sample(folder, trained_llama, tokenizer, lm):
    """lm-eval's own class and evaluator are the truth."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    metadata = {"tokenizer": LLAMA, "length": 96}
    reference = evaluator.simple_evaluate(
        HFLM(pretrained=trained_llama, tokenizer=tokenizer, max_length=512),
        tasks=["my_lists", "my_sums"],
        task_manager=TaskManager(include_path=folder, include_defaults=False, metadata=metadata),
        bootstrap_iters=0,
    )
    _, lists, sums = load_own(folder, "my_tag")
    result = external_tasks.evaluate(lm, lists, None)
    rows = sorted(reference["samples"]["my_lists"], key=lambda sample: sample["doc_id"])
    assert [row["score"] for row in result.samples] == [row["acc"] for row in rows]
    assert 0 < sum(row["acc"] for row in rows) < len(rows) == 6
    assert {row["chance"] for row in result.samples} == {0.25}
    assert list(result.metrics) == ["acc_norm"]  # the first metric is the samples' score
    own = reference["results"]["my_lists"]
    assert result.metrics["acc_norm"]["value"] == own["acc_norm,none"]
    scores = [row["acc_norm"] for row in rows]
    assert result.metrics["acc_norm"]["scores"] == scores
    assert result.metrics["acc_norm"]["stderr"] == pytest.approx(mean_stderr(scores))

    result = external_tasks.evaluate(lm, sums, None)
    assert result.samples == []
    own = reference["results"]["my_sums"]
    nats = math.log(result.metrics["perplexity"]["value"])
    assert nats == pytest.approx(math.log(own["perplexity,none"]), rel=1e-6)
    assert "scores" not in result.metrics["perplexity"]  # no mean from 0 to 1
    assert result.metrics["acc"]["scores"] == [0.0] * 5


def test_a_failed_sample_has_its_reason_and_no_score(folder, lm):
    (lists, _) = load_own(folder, "my_lists")
    lm.failures["my_lists", 2] = "no memory"
    result = external_tasks.evaluate(lm, lists, None)
    is_failed = [i == 2 for i in range(6)]
    assert [row["score"] is None for row in result.samples] == is_failed
    assert result.samples[2]["error"] == "no memory"
    assert [score is None for score in result.metrics["acc_norm"]["scores"]] == is_failed


def test_records_of_lengths_are_one_retrieval_task(folder, lm):
    results = ExternalResults()
    for external in load_own(folder, "my_tag"):
        results.add(external, "none", external_tasks.evaluate(lm, external, 3))
    (record,) = results.retrieval()
    assert (record["task"], record["lengths"], record["depths"]) == ("my_lists", [64, 96], [50])
    assert [row["length"] for row in record["samples"]["none"]] == [64] * 3 + [96] * 3
    names = ["my_lists@64", "my_lists@96", "my_sums"]
    assert [entry["task"] for entry in results.harness()] == names


def test_a_task_of_lm_eval_that_reports_would_call_as_ours_is_marked():
    results = ExternalResults()
    sample = {"id": "a/0", "length": 512, "depth": None, "score": 1.0}
    for name in ("niah_single_1", "babilong_qa1"):
        external = ExternalTask(name, 512, None)
        results.add(external, "none", external_tasks.ExternalResult({}, [sample]))
    names = [record["task"] for record in results.retrieval()]
    assert names == ["lm-eval niah_single_1", "babilong_qa1"]


def test_a_builder_that_fails_is_named(tmp_path):
    folder = write_tasks(tmp_path / "tasks")
    path = tmp_path / "tasks" / "sums.yaml"
    path.write_text(path.read_text().replace("builder.sums", "builder.totals"))
    with pytest.raises(ValueError, match=r"'my_sums' of .*cannot be built: .*totals"):
        load_own(folder, "my_sums")


# -- the index of names ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(folder):
    return TaskIndex([folder])


def test_a_folder_has_its_tasks_tags_and_groups(index):
    assert set(index.own) == {"my_lists", "my_sums", "my_pages", "my_tag", "my_group"}
    assert index.members("my_tag") == ["my_lists", "my_sums"]
    assert index.members("my_group") == ["my_lists", "my_pages"]
    assert index.members("my_sums") == ["my_sums"]


def test_a_users_task_takes_a_length_if_its_metadata_have_one(index, tmp_path):
    names = ("my_lists", "my_sums", "my_pages")
    assert [index.accepts_length(name) for name in names] == [True, False, False]
    assert index.length_metadata("my_lists", 4096) == {"length": 4096}
    (tmp_path / "a.yaml").write_text("task: like_ruler\nmetadata: {max_seq_lengths: [4096]}\n")
    metadata = TaskIndex([str(tmp_path)]).length_metadata("like_ruler", 8192)
    assert metadata == {"max_seq_lengths": [8192]}


def test_lm_evals_tasks_are_known_beside_a_folder(index):
    assert index.accepts_length("longcxt")
    assert len(index.members("ruler")) == len(index.members("longcxt")) == 13
    assert index.length_metadata("babilong", 4096) == {"max_seq_lengths": "4k"}
    assert index.length_metadata("niah_single_1", 4096) == {"max_seq_lengths": [4096]}
    assert not index.accepts_length("arc_easy")


def test_unknown_names_get_a_hint(index):
    for name, hint in (("niah_singel_1", "'niah_single_1'"), ("my_list", "'my_lists'")):
        with pytest.raises(ValueError, match=hint):
            index.entry(name)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("task: [a\n", "line"),
        ("task: a\ninclude: missing.yaml\n", "missing.yaml"),
        ("doc_to_text: a\n", "`task`"),
        ("task: my_sums\n", "both have a task 'my_sums'"),
    ],
)
def test_files_that_are_no_tasks_or_name_one_twice_are_refused(folder, tmp_path, content, fact):
    (tmp_path / "file.yaml").write_text(content)
    with pytest.raises(ValueError, match=fact) as refusal:
        TaskIndex([folder, str(tmp_path)])
    assert str(tmp_path) in str(refusal.value)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file.yaml").touch()
    for name, fact in (("none", "not there"), ("file.yaml", "is a file")):
        with pytest.raises(ValueError, match=f"{name} .*{fact}"):
            TaskIndex([str(tmp_path / name)])


def test_a_group_with_a_task_of_ours_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("group: mine\ntask: [rp_vt]\n")
    with pytest.raises(ValueError, match=r"'rp_vt'.*--tasks"):
        TaskIndex([str(tmp_path)]).members("mine")
