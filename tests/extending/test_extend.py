"""Test `extend`: the published folder, resumption after kills, refusals, and no help."""

import json
import shutil
from html import unescape

import pytest
import torch
from extensions import LENGTH, TINY, TRAINED, extend_tiny, extend_until_killed, files, step_result
from helpers.commands import run_in_this_process
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation import RunStatistics
from rope_patch.exporting import ENGINES
from rope_patch.extending import Candidate, ExtendRequest, publish, write_exports


def test_a_method_is_published_with_its_evidence(finished):
    result, out = finished
    assert result.outcome == "published"
    assert (result.trained_length, result.length) == (TRAINED, LENGTH)
    assert result.folder == out / "model"
    assert result.sentence.startswith(f"Use {result.method} at 1,024 tokens. ")
    for words in ("nats a token", "95% interval", "n = 12, 12 texts"):
        assert words in result.sentence
    report = {f"report/{name}" for name in ("report.html", "report.json", "recommendation.md")}
    model = {"config.json", "rope_patch.json", "model.safetensors", "tokenizer.json"}
    assert model | report <= set(files(result.folder))


def test_the_published_folder_rotates_as_its_sidecar_says(finished):
    result, _ = finished
    sidecar = json.loads((result.folder / "rope_patch.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(model, sidecar["method"], length=LENGTH, **(sidecar.get("options") or {}))
    published = rope_patch.load(result.folder)
    handle = rope_patch.current(published)
    assert str(handle.method) == result.method
    assert handle.length == LENGTH
    ids = (torch.arange(600) * 7 % 500 + 5)[None]
    with torch.no_grad():
        assert torch.equal(published(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(TINY).get_vocab()


def test_the_published_method_answers_at_the_target(finished):
    result, out = finished
    report = json.loads((out / "work" / "report" / "report.json").read_text())
    questions = next(e for e in report["retrieval"] if e["task"] == "rp_recall_ll")
    scores = {
        label: [row["score"] for row in rows if row["length"] == LENGTH]
        for label, rows in questions["samples"].items()
    }
    assert len(scores["none"]) == 12
    assert sum(scores[result.method]) >= sum(scores["none"]) + 6
    # The recommendation was made on questions of another seed.
    assert report["run"]["seed"] == 43


def test_the_card_names_method_lengths_evidence_and_gaps(finished):
    result, _ = finished
    card = (result.folder / "README.md").read_text()
    method = json.loads((result.folder / "rope_patch.json").read_text())["method"]
    header = ModelCard(card, ignore_metadata_errors=False).data  # as the hub reads it
    data = header.to_dict()
    name, evaluations = model_index_to_eval_results(data.pop("model-index"))
    assert data == {
        "library_name": "transformers",
        "tags": ["rope_patch", "long-context", method],
    }
    assert name == "tiny-llama"
    report = json.loads((result.folder / "report" / "report.json").read_text())
    stats = RunStatistics(report)
    accuracies = {
        (e.dataset_args["task"], e.dataset_args["length"]): e.metric_value
        for e in evaluations
        if e.metric_type == "accuracy" and {"task", "length"} <= e.dataset_args.keys()
    }
    assert accuracies == {
        (task, length): round(accuracy.estimate, 4)
        for task in stats.tasks
        for length in stats.lengths
        if (accuracy := stats.accuracy(result.method, task, (length,)))
    }
    assert {e.metric_args["method"] for e in evaluations} == {stats.names[result.method]}
    usable = [e.metric_value for e in evaluations if e.metric_type == "usable_length"]
    expected = stats.usable_length(result.method)
    assert usable == ([expected.stated] if expected and expected.stated else [])
    for words in (
        "# tiny-llama, 256 → 1,024 tokens",
        f"| method | {result.method} |",
        "| usable length, 85% of the short-context score | ",
        "12 questions about 12 texts at each length",
        "| plain model |",
        "as they were: nothing was trained",
        "Made by `made by a test`",
        *(f"- {line}" for line in result.left_out),
    ):
        assert words in card
    assert any("lengths between" in line for line in result.left_out)


def test_the_page_shows_all_steps_and_its_links_resolve(finished):
    result, out = finished
    page = (out / "progress.html").read_text()
    for step in ("diagnose", "recommend", "compare", "publish"):
        assert f"<strong>{step}</strong>" in page
    assert page.count('class="state-done"') == 4
    assert result.sentence in unescape(page)
    assert "http-equiv" not in page  # it is finished, so it need not be read again
    for link in ("work/report/report.html", "model/README.md"):
        assert f'href="{link}"' in page
        assert (out / link).is_file()


# -- the folder to publish -------------------------------------------------------------------------


def parsed(arguments):
    """Return a command line's words, JSON among them as data: the order of keys is free."""
    return [json.loads(word) if word.startswith("{") else word for word in arguments]


@pytest.mark.parametrize(
    ("method", "engines"),
    [("yarn", set(ENGINES)), ("dynamic-yarn", {"vllm"}), ("rerope", set())],
)
def test_exports_are_those_of_the_patched_model(tmp_path, method, engines):
    folder = tmp_path / "model"
    rope_patch.patch_checkpoint(TINY, folder, method, length=LENGTH)
    write_exports(folder)
    assert {path.stem for path in (folder / "exports").glob("*.json")} == engines
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(model, method, length=LENGTH)
    page = (folder / "exports" / "README.md").read_text()
    for engine in ENGINES:
        section = page.split(f"## {engine}\n")[1].split("\n## ")[0]
        assert section.strip().startswith("Not from this folder: ") == (engine not in engines)
    # Lines of these depend on the config that is converted.
    for engine in engines - {"llama.cpp", "mlx", "mlx-vlm"}:
        written = json.loads((folder / "exports" / f"{engine}.json").read_text())
        expected = rope_patch.export(model, engine)
        assert written["config"] == expected.config
        assert parsed(written["arguments"]) == parsed(expected.arguments)
    if "vllm" in engines:
        assert "`vllm serve . --hf-overrides" in page


def test_required_engines_are_first_on_the_page_or_refuse_the_folder(tmp_path):
    folder = tmp_path / "model"
    rope_patch.patch_checkpoint(TINY, folder, "yarn", length=LENGTH)
    write_exports(folder, ("llama.cpp", "vllm"))
    page = (folder / "exports" / "README.md").read_text()
    assert page.index("## llama.cpp\n") < page.index("## vllm\n") < page.index("## transformers\n")
    dynamic = tmp_path / "dynamic"
    rope_patch.patch_checkpoint(TINY, dynamic, "dynamic-yarn", length=LENGTH)
    with pytest.raises(rope_patch.Refused, match="vllm needs rope_patch's plugin"):
        write_exports(dynamic, ("vllm",))  # exported, but not served without this package
    assert not (dynamic / "exports").exists()


def test_a_publication_that_fails_leaves_nothing_behind(tmp_path):
    request = ExtendRequest(model=TINY, to="4x", out=tmp_path, budget=10.0)
    (tmp_path / "report").mkdir()
    no_facts = {}
    with pytest.raises(KeyError):
        publish(request, Candidate("yarn"), LENGTH, tmp_path / "report", no_facts)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


# -- continuing ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_is_killed_after_each_step_gives_the_same(finished, tmp_path):
    result, whole = finished
    out = tmp_path / "out"
    extend_until_killed(out, 1)  # after diagnose
    assert 'class="state-done"' not in (out / "progress.html").read_text()
    extend_until_killed(out, 1)  # after recommend
    extend_until_killed(out, 1)  # after the plan of samples
    extend_until_killed(out, 1)  # after compare
    assert not (out / "model").exists()
    extend_until_killed(out, 1)  # after publish
    continued = extend_tiny(out)
    assert continued.sentence == result.sentence
    assert continued.left_out == result.left_out
    for step in ("diagnose", "recommend", "sample-plan", "compare"):
        assert step_result(out, step) == step_result(whole, step)
    assert files(out / "model") == files(whole / "model")
    for name in ("README.md", "config.json", "rope_patch.json", "model.safetensors"):
        assert (out / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()


@pytest.mark.parametrize(
    ("damaged", "missing"),
    [
        (False, ["publish"]),
        pytest.param(False, ["compare", "publish"], marks=pytest.mark.slow),
        (True, []),
    ],
)
def test_steps_without_a_result_are_made_again_with_the_same_outcome(
    finished, tmp_path, caplog, damaged, missing
):
    """Copy a run as if it was killed before its last steps wrote their results."""
    result, whole = finished
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    publication = out / "work" / "publish.json"
    if damaged:
        publication.write_text(publication.read_text().replace("written", "w"))
    for step in missing:
        (out / "work" / f"{step}.json").unlink()
    continued = extend_tiny(out)
    assert ("is made again: it is damaged" in caplog.text) == damaged
    assert continued.sentence == result.sentence
    assert step_result(out, "compare") == step_result(whole, "compare")
    assert files(out / "model") == files(whole / "model")
    card = (out / "model" / "README.md").read_bytes()
    assert card == (whole / "model" / "README.md").read_bytes()


def test_the_same_command_measures_nothing_again(finished):
    result, out = finished
    before = {name: (out / "model" / name).stat().st_mtime_ns for name in files(out / "model")}
    assert extend_tiny(out).to_dict() == result.to_dict()
    after = {name: (out / "model" / name).stat().st_mtime_ns for name in files(out / "model")}
    assert after == before


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"to": "2x"}, ["to was '4x', got '2x'"]),
        ({"budget": "1h"}, ["budget was 10800.0, got 3600.0"]),
        ({"seed": 1, "samples": 24}, ["samples was 12, got 24", "seed was 42, got 1"]),
    ],
)
def test_changed_arguments_are_refused(finished, changes, facts):
    _, out = finished
    before = files(out)
    with pytest.raises(rope_patch.Refused) as error:
        extend_tiny(out, **changes)
    for fact in facts:
        assert fact in str(error.value)
    assert files(out) == before


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"to": "1x"}, "above the 256 tokens"),
        ({"to": 128}, "got 128 (128 tokens)"),
        ({"to": "256"}, "above the 256 tokens"),
        ({"to": "four"}, "to must be a factor such as 4x"),
        ({"to": "-4x"}, "to must be above"),
        ({"to": "512.5"}, "tokens such as 32768"),
        ({"budget": "8"}, "budget must be a time with its unit"),
        ({"budget": "0s"}, "budget must be at least a second"),
        ({"samples": 2}, "samples must be at least 6"),
        ({"data": ["novels:emma"]}, "--train"),
        ({"recipe": {"max_steps": 2}}, "recipe is for training"),
        ({"engines": "vlm"}, "did you mean 'vllm'?"),
        ({"engines": ["axolotl"]}, "axolotl trains models"),
        ({"train": True, "recipe": {"method": "rerope"}, "engines": "mlx"}, "rerope cannot be"),
        ({"train": True, "recipe": {"length": 2}}, "recipe: length"),
        ({"train": True, "recipe": {"lora_rnk": 2}}, "did you mean 'lora_rank'?"),
        ({"train": True, "start": "running"}, "start running"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_is_written(
    tmp_path, changes, fact
):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        extend_tiny(tmp_path / "out", **changes)
    assert fact in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(rope_patch.Refused, match="holds no extension"):
        extend_tiny(tmp_path)
    assert files(tmp_path) == ["notes.txt"]


def test_a_saved_patch_and_several_processes_are_refused(finished, tmp_path, monkeypatch):
    result, _ = finished
    with pytest.raises(rope_patch.Refused, match="saved with a patch"):
        rope_patch.extend(result.folder, "2x", out=tmp_path / "out")
    monkeypatch.setattr("rope_patch.utils.processes.Processes.__init__", _start_as_one_of_two)
    with pytest.raises(rope_patch.Refused, match="one process, got 2"):
        extend_tiny(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _start_as_one_of_two(processes):
    processes.rank, processes.size = 0, 2


@pytest.mark.slow
def test_a_budget_too_small_to_compare_says_what_it_takes(tmp_path):
    with pytest.raises(rope_patch.Refused, match="budget must be larger, got 1 s") as error:
        extend_tiny(tmp_path / "out", budget="1s")
    assert "expected about" in str(error.value)
    page = unescape((tmp_path / "out" / "progress.html").read_text())
    assert f"Stopped: {error.value}"[:80] in page
    assert "The same command continues from here" in page


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """Save the tiny model with random weights: it answers nothing, so no method can help."""
    folder = tmp_path_factory.mktemp("random") / "model"
    model = AutoModelForCausalLM.from_pretrained(TINY)
    torch.manual_seed(0)
    type(model)(model.config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("never_drawn")
def test_where_no_method_helps_nothing_is_published_and_the_exit_code_is_3(random_model, tmp_path):
    out = tmp_path / "out"
    words = ["extend", random_model, "--to", "2x", "--budget", "1h", "--samples", "6", "--out", out]
    first = run_in_this_process(*words, "--no-search")
    assert first.returncode == 3, first.stderr
    assert first.stdout.startswith("Nothing can be recommended by these questions")
    assert "step 2 of 4: recommend (up to " in first.stderr
    assert not (out / "model").exists()
    assert (out / "work" / "recommend" / "recommendation.md").is_file()
    page = (out / "progress.html").read_text()
    assert page.count('class="state-left-out"') == 2
    again = run_in_this_process(*words, "--no-search", "--json")
    assert again.returncode == 3
    result = json.loads(again.stdout)
    assert result["outcome"] == "nothing is shown to help"
    assert result["folder"] is None
    assert result["sentence"] in first.stdout
    changed = run_in_this_process(*words, "--no-search", "--seed", "1")
    assert changed.returncode == 1
    assert "error: cannot continue" in changed.stderr


def test_help_names_the_steps_and_the_exit_code():
    text = run_in_this_process("extend", "--help").stdout
    for word in ("--to", "--budget", "--train", "--out", "--data", "exit code"):
        assert word in text
