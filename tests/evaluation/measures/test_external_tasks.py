"""Test lm-eval's own tasks with the long-context language model, offline."""

import math
import sys
from pathlib import Path

import pytest
import requests
from helpers.user_tasks import write_tasks
from lm_eval.api.metrics import mean_stderr
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import external_tasks
from rope_patch.evaluation.measures.external_results import ExternalResults
from rope_patch.evaluation.measures.external_tasks import ExternalTask

LLAMA = str(Path(__file__).parents[2] / "assets" / "tiny-llama")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail if a task builder contacts a server."""
    import nltk

    def fail(*_, **__):
        pytest.fail("the network was asked")

    monkeypatch.setattr(nltk, "download", fail)
    monkeypatch.setattr(requests, "get", fail)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(LLAMA).eval()


def language_model(model, longest):
    return LongContextLM(model, AutoTokenizer.from_pretrained(LLAMA), longest, {"model": "tiny"})


@pytest.fixture(scope="module")
def single():
    """Load a task of RULER at two lengths; nltk's download is off during the import."""
    return external_tasks.load(["niah_single_1"], [512, 1024], LLAMA)


class TestRuler:
    def test_a_task_is_loaded_once_for_each_length(self, single):
        assert [external.label for external in single] == [
            "niah_single_1@512",
            "niah_single_1@1024",
        ]
        for external, length in zip(single, (512, 1024), strict=True):
            docs = list(external.task.eval_docs)
            assert len(docs) == 500
            assert {doc["max_length"] for doc in docs} == {length}
            assert all(length // 2 < doc["length"] <= length for doc in docs)

    def test_a_limit_applies_to_each_length(self, single, model):
        lm = language_model(model, 1024)
        lengths, hits = [], []
        generate = lm.generate_until

        def generate_and_record(requests, **kwargs):
            answers = generate(requests, **kwargs)
            lengths.append([request.doc["max_length"] for request in requests])
            hits.append(
                [
                    request.doc["outputs"][0] in answer
                    for request, answer in zip(requests, answers, strict=True)
                ]
            )
            return answers

        lm.generate_until = generate_and_record
        results = [external_tasks.evaluate(lm, external, limit=2) for external in single]
        assert lengths == [[512, 512], [1024, 1024]]
        assert not lm.failures
        # Metrics of other lengths, which are -1, are dropped, and this length's are the samples'.
        assert [result.metrics for result in results] == [{}, {}]
        for result, length, right in zip(results, (512, 1024), hits, strict=True):
            assert [row["score"] for row in result.samples] == right
            assert {row["length"] for row in result.samples} == {length}
            assert [row["id"] for row in result.samples] == [
                f"niah_single_1@{length}/{number}" for number in range(2)
            ]

    def test_answers_of_the_model_are_scored(self, single, model):
        lm = language_model(model, 1024)
        outcomes = iter([True, False, True, True])

        def generate(requests, disable_tqdm=False):
            return [request.doc["outputs"][0] if next(outcomes) else "no" for request in requests]

        lm.generate_until = generate
        samples = external_tasks.evaluate(lm, single[0], limit=4).samples
        assert [row["score"] for row in samples] == [1.0, 0.0, 1.0, 1.0]
        assert [row["text"] for row in samples] == [0, 1, 2, 3]  # no two share one

    def test_missing_data_in_a_group_or_tag_names_the_task(self, monkeypatch):
        names = []
        load_with = external_tasks._load_with
        monkeypatch.setattr(
            external_tasks,
            "_load_with",
            lambda manager, name, root=None: (
                names.append(name) or ({} if "1" in name else load_with(manager, name))
            ),
        )
        with pytest.raises(ValueError, match=r"'niah_single_2' cannot be had.*HF_HUB_OFFLINE"):
            external_tasks.load(["ruler"], [1024], LLAMA)
        assert names == ["niah_single_1", "niah_single_2"]

    def test_questions_are_not_fetched_offline(self):
        with pytest.raises(ValueError, match=r"rajpurkar\.github\.io.* was not asked"):
            external_tasks.load(["ruler_qa_squad"], [1024], LLAMA)

    def test_lengths_at_which_a_builder_never_ends_are_refused(self):
        with pytest.raises(ValueError, match=r"cannot make ruler_vt at 512 tokens.*rp_vt"):
            external_tasks.load(["ruler_vt"], [512], LLAMA)

    def test_lengths_without_room_for_answers_are_refused(self):
        with pytest.raises(ValueError, match="ruler_cwe makes samples without an answer"):
            external_tasks.load(["ruler_cwe"], [512], LLAMA)

    def test_network_timeouts_are_undone(self):
        before = sys.modules["nltk"].download, requests.get
        with external_tasks._network_timeouts():
            assert sys.modules["nltk"].download is not before[0]
        assert (sys.modules["nltk"].download, requests.get) == before


class TestOthers:
    @pytest.mark.parametrize("name", ["babilong_qa1", "arc_easy"])
    def test_missing_data_is_an_error_with_advice(self, name):
        with pytest.raises(ValueError, match=rf"'{name}' cannot be had: .*unset HF_HUB_OFFLINE"):
            external_tasks.load([name], [4096], LLAMA)

    def test_longbench_without_its_packages_or_data_is_an_error(self):
        message = r"'longbench_2wikimqa' (needs a package.*install|cannot be had)"
        with pytest.raises(ValueError, match=message):
            external_tasks.load(["longbench_2wikimqa"], [4096], LLAMA)

    def test_no_tasks_load_as_an_empty_list(self):
        assert external_tasks.load([], [512], LLAMA) == []


def make_task(**generation):
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = [{"question": f"{i} and {i} are", "answer": "many"} for i in range(4)]
    return ConfigurableTask(
        config={
            "task": "sums",
            "dataset_path": "",
            "test_split": "test",
            "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3, **generation},
            "metric_list": [{"metric": "exact_match"}],
            "metadata": {"version": 1.0},
        }
    )


class TestGenerationSettings:
    def test_a_temperature_without_sampling_is_ignored(self, model):
        # LongBench's tasks have these settings.
        task = make_task(do_sample=False, temperature=1)
        external_tasks._require_greedy("sums", task)
        external = ExternalTask("sums", None, task)
        result = external_tasks.evaluate(language_model(model, 64), external, None)
        assert len(result.metrics["exact_match"].pop("prompts")) == 32
        assert result.metrics["exact_match"] == {"value": 0.0, "stderr": None, "scores": [0.0] * 4}

    @pytest.mark.parametrize("settings", [{"do_sample": True}, {"temperature": 0.7}])
    def test_sampling_is_refused_when_tasks_are_loaded(self, settings):
        with pytest.raises(ValueError, match="'sums' samples its answers"):
            external_tasks._require_greedy("sums", make_task(**settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("user") / "tasks")


class TestUsersTasks:
    def load(self, folder, *names):
        return external_tasks.load(list(names), [64, 96], LLAMA, (folder,))

    def test_tasks_that_take_a_length_are_built_once_for_each(self, folder):
        loaded = self.load(folder, "my_tag", "my_group")
        assert [external.label for external in loaded] == [
            "my_lists@64",
            "my_lists@96",
            "my_sums",
            "my_pages",
        ]
        sizes = [len(external.task.eval_docs[0]["input"].split()) for external in loaded[:2]]
        assert sizes == [2 + 2 * (64 // 16), 2 + 2 * (96 // 16)]

    def test_scores_are_lm_evals_of_each_sample(self, folder, model):
        """lm-eval's own class and evaluator are the truth."""
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager

        tokenizer = AutoTokenizer.from_pretrained(LLAMA)
        reference = evaluator.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, max_length=512),
            tasks=["my_lists", "my_sums"],
            task_manager=TaskManager(
                include_path=folder,
                include_defaults=False,
                metadata={"tokenizer": LLAMA, "length": 96},
            ),
            bootstrap_iters=0,
        )
        _, lists, sums = self.load(folder, "my_tag")
        result = external_tasks.evaluate(language_model(model, 10**9), lists, None)
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

        result = external_tasks.evaluate(language_model(model, 10**9), sums, None)
        assert result.samples == []
        own = reference["results"]["my_sums"]
        nats = math.log(result.metrics["perplexity"]["value"])
        assert nats == pytest.approx(math.log(own["perplexity,none"]), rel=1e-6)
        assert "scores" not in result.metrics["perplexity"]  # no mean from 0 to 1
        assert result.metrics["acc"]["scores"] == [0.0] * 5

    def test_a_failed_sample_has_its_reason_and_no_score(self, folder, model):
        lm = language_model(model, 10**9)
        (lists, _) = self.load(folder, "my_lists")
        lm.failures["my_lists", 2] = "no memory"
        result = external_tasks.evaluate(lm, lists, None)
        assert [row["score"] is None for row in result.samples] == [i == 2 for i in range(6)]
        assert result.samples[2]["error"] == "no memory"
        assert [score is None for score in result.metrics["acc_norm"]["scores"]] == [
            i == 2 for i in range(6)
        ]

    def test_records_of_lengths_are_one_retrieval_task(self, folder, model):
        results = ExternalResults()
        for external in self.load(folder, "my_tag"):
            result = external_tasks.evaluate(language_model(model, 10**9), external, 3)
            results.add(external, "none", result)
        (record,) = results.retrieval()
        assert (record["task"], record["lengths"], record["depths"]) == ("my_lists", [64, 96], [50])
        assert [row["length"] for row in record["samples"]["none"]] == [64] * 3 + [96] * 3
        assert [entry["task"] for entry in results.harness()] == [
            "my_lists@64",
            "my_lists@96",
            "my_sums",
        ]

    def test_a_task_of_lm_eval_that_reports_would_call_as_ours_is_marked(self):
        results = ExternalResults()
        sample = {"id": "a/0", "length": 512, "depth": None, "score": 1.0}
        for name in ("niah_single_1", "babilong_qa1"):
            external = ExternalTask(name, 512, None)
            results.add(external, "none", external_tasks.ExternalResult({}, [sample]))
        names = [record["task"] for record in results.retrieval()]
        assert names == ["lm-eval niah_single_1", "babilong_qa1"]

    def test_a_builder_that_fails_is_named(self, tmp_path):
        folder = write_tasks(tmp_path / "tasks")
        path = tmp_path / "tasks" / "sums.yaml"
        path.write_text(path.read_text().replace("builder.sums", "builder.totals"))
        with pytest.raises(ValueError, match=r"'my_sums' of .*cannot be built: .*totals"):
            self.load(folder, "my_sums")
