"""Test lm-eval's own tasks with the long-context language model, offline."""

import math
import sys
from pathlib import Path

import pytest
import requests
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.evaluation.language_model import LongContextLM
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
        assert [name for name, _ in single] == ["niah_single_1@512", "niah_single_1@1024"]
        for (_, task), length in zip(single, (512, 1024), strict=True):
            docs = list(task.eval_docs)
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
        scores = external_tasks.evaluate(lm, single, limit=2)
        assert lengths == [[512, 512], [1024, 1024]]
        assert not lm.failures
        # Metrics of other lengths, which are -1, are dropped.
        assert {name: list(metrics) for name, metrics in scores.items()} == {
            "niah_single_1@512": ["512"],
            "niah_single_1@1024": ["1024"],
        }
        assert scores["niah_single_1@512"]["512"]["value"] == sum(hits[0]) / 2
        assert scores["niah_single_1@1024"]["1024"]["value"] == sum(hits[1]) / 2

    def test_answers_of_the_model_are_scored(self, single, model):
        lm = language_model(model, 1024)
        outcomes = iter([True, False, True, True])

        def generate(requests, disable_tqdm=False):
            return [request.doc["outputs"][0] if next(outcomes) else "no" for request in requests]

        lm.generate_until = generate
        (scores,) = external_tasks.evaluate(lm, single[:1], limit=4).values()
        assert scores["512"]["value"] == 0.75
        # The standard error of a mean of 4 with a sample variance of 3/4 * 1/4 * 4/3.
        assert scores["512"]["stderr"] == pytest.approx(math.sqrt(0.25 / 4))

    def test_missing_data_in_a_group_or_tag_names_the_task(self, monkeypatch):
        names = []
        load_with = external_tasks._load_with
        monkeypatch.setattr(
            external_tasks,
            "_load_with",
            lambda manager, name: (
                names.append(name) or ({} if "1" in name else load_with(manager, name))
            ),
        )
        with pytest.raises(ValueError, match=r"'niah_single_2' cannot be had.*HF_HUB_OFFLINE"):
            external_tasks.load(["ruler"], [1024], LLAMA)
        assert names == ["niah_single_1", "niah_single_2"]
        assert external_tasks.accepts_length("longcxt")
        assert (
            len(external_tasks._member_tasks("ruler"))
            == len(external_tasks._member_tasks("longcxt"))
            == 13
        )

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

    def test_lengths_of_babilong_have_its_names(self):
        assert external_tasks.length_metadata("babilong", 4096) == {"max_seq_lengths": "4k"}
        assert external_tasks.length_metadata("niah_single_1", 4096) == {"max_seq_lengths": [4096]}

    def test_unknown_names_get_a_hint(self):
        with pytest.raises(ValueError, match=r"'niah_singel_1' \(did you mean 'niah_single_1'"):
            external_tasks.load(["niah_singel_1"], [512], LLAMA)

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
        scores = external_tasks.evaluate(language_model(model, 64), [("sums", task)], None)
        assert scores["sums"]["exact_match"]["value"] == 0.0

    @pytest.mark.parametrize("settings", [{"do_sample": True}, {"temperature": 0.7}])
    def test_sampling_is_refused_when_tasks_are_loaded(self, settings):
        with pytest.raises(ValueError, match="'sums' samples its answers"):
            external_tasks._require_greedy("sums", make_task(**settings))
