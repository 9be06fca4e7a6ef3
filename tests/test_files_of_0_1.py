"""Test that files of rope-patch 0.1 load, and that its interrupted runs resume.

Uses public names and commands only, but for the installed versions, so that module names may
change.
"""

import contextlib
import io
import json
import platform
import runpy
import shutil
import sys
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.utils import version

pytestmark = pytest.mark.usefixtures("never_drawn")
ROOT = Path(__file__).parents[1]
ASSETS = Path("tests") / "assets"  # as the commands named it, which the files repeat
FILES = ROOT / ASSETS / "written_by_0_1"
LLAMA = ASSETS / "tiny-llama"
LONG_FACTOR = [1 + 0.25 * pair for pair in range(16)]
# Folder under `saved`: the model, and the arguments of its patch.
SAVED = {
    "yarn": ("tiny-llama", "yarn", {"factor": 4, "beta_fast": 16}),
    "dynamic-yarn": ("tiny-qwen3", "dynamic-yarn", {"length": 1024}),
    "longrope": (
        "tiny-gemma3",
        "longrope",
        {"factor": 2, "long_factor": LONG_FACTOR, "start_tokens": 4},
    ),
}


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def same_versions(monkeypatch):
    """Report the package versions of the stored runs, because answers are stored per version."""
    versions = read("eval/report.json")["run"]["versions"] | read("search/found.json")["versions"]
    python = versions.pop("python")
    versions = {name.replace("_", "-"): each for name, each in versions.items()}
    installed = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda package: versions.get(package) or installed(package)
    )
    monkeypatch.setattr(platform, "python_version", lambda: python)
    version.cache_clear()  # it asks for each package once
    yield
    version.cache_clear()


def read(name):
    return json.loads((FILES / name).read_text())


def copy_of(name, folder):
    """Return a writable copy of a stored folder."""
    return Path(shutil.copytree(FILES / name, folder / name))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*words):
    """Run a command in this process and return its exit code, stdout and stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rope-patch", *map(str, words)])
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                runpy.run_module("rope_patch", run_name="__main__")
            except SystemExit as error:
                status = error.code or 0
    return status, stdout.getvalue(), stderr.getvalue()


def printed_json(*words):
    """Run a command that must succeed, and return the JSON that it prints."""
    status, stdout, stderr = run(*words, "--json")
    assert status == 0, stderr
    return json.loads(stdout)


def model(name="tiny-llama"):
    return AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model):
    """Return logits of a text longer than the trained length of 256 tokens."""
    device = next(model.parameters()).device
    ids = torch.randint(5, 500, (1, 320), generator=torch.Generator().manual_seed(0))
    return model(ids.to(device)).logits.cpu()


def frequencies(method, **options):
    """Return a method's frequencies for the tiny models' geometry."""
    geometry = {"head_dim": 32, "theta": 1e4, "trained_length": 256}
    return rope_patch.frequencies(method, **geometry, **options)


def assert_close(values, expected, rel=1e-12):
    torch.testing.assert_close(
        torch.tensor(values, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=rel,
        atol=0,
    )


def assert_same(value, expected):
    """Assert equal plain data, with a tolerance for numbers computed on another machine."""
    if isinstance(expected, dict):
        assert list(value) == list(expected)
        for key in expected:
            assert_same(value[key], expected[key])
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for item, expected_item in zip(value, expected, strict=True):
            assert_same(item, expected_item)
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)
    else:
        assert value == expected


# -- saved by rope_patch.save


@pytest.mark.parametrize("name", SAVED)
def test_saved_model_loads_patched(name, tmp_path):
    plain, method, options = SAVED[name]
    folder = Path(shutil.copytree(ASSETS / plain, tmp_path / "model"))
    shutil.copytree(FILES / "saved" / name, folder, dirs_exist_ok=True)
    loaded = rope_patch.load(folder, dtype=torch.float32)
    patched, unpatched = model(plain), model(plain)
    handle = rope_patch.patch(patched, method, **options)
    assert rope_patch.current(loaded).summary() == handle.summary()
    assert logits(loaded).equal(logits(patched))
    assert not logits(loaded).equal(logits(unpatched))
    rope_patch.unpatch(loaded)
    assert logits(loaded).equal(logits(unpatched))


@pytest.mark.parametrize("name", SAVED)
def test_sidecar_frequencies_match_todays_methods(name):
    _, method, options = SAVED[name]
    options = {"factor": 4} if "length" in options else options
    (stored,) = read(f"saved/{name}/rope_patch.json")["frequencies"].values()
    expected = frequencies(method, **options)
    assert_close(stored["inv_freq"], expected.inv_freq)
    assert stored["attention_factor"] == pytest.approx(expected.attention_factor, rel=1e-12)


def test_saved_model_exports(tmp_path):
    folder = Path(shutil.copytree(ASSETS / "tiny-llama", tmp_path / "model"))
    shutil.copytree(FILES / "saved" / "yarn", folder, dirs_exist_ok=True)
    fields = printed_json("export", folder, "--engine", "vllm")["config"]
    assert fields["max_position_embeddings"] == 1024
    assert fields["rope_parameters"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
    }


def test_adapter_loads_on_its_trained_rotation_only():
    peft = pytest.importorskip("peft")
    folder = FILES / "saved" / "adapter"
    base = model()
    rope_patch.patch(base, "ntk", factor=4)
    without_adapter = logits(base)
    expected = logits(peft.PeftModel.from_pretrained(base, folder).eval())
    assert not expected.equal(without_adapter)
    other = model()
    rope_patch.patch(other, "ntk", factor=4)
    assert logits(rope_patch.load_adapter(other, folder).eval()).equal(expected)
    with_base = rope_patch.load(folder, dtype=torch.float32).eval()  # the sidecar names the base
    assert logits(with_base).equal(expected)
    wrong = model()
    rope_patch.patch(wrong, "yarn", factor=4)
    with pytest.raises(ValueError, match="ntk"):
        rope_patch.load_adapter(wrong, folder)


# -- an evaluation's folder


EVAL = [
    *("eval", LLAMA, "--method", "none,yarn", "--factor", 2, "--lengths", 352, "--depths", 50),
    *("--samples", 2, "--tasks", "rp_json_kv_ll,perplexity,rp_short_cloze", "--window", 32),
    *("--short-samples", 2, "--text", "persuasion", "--dtype", "float32", "--device-map", "cpu"),
    *("--control-context", 128),  # 0.1's default here: half the trained length
]
MEASURED = ("methods", "perplexity", "retrieval", "short")


def test_report_renders_old_results(tmp_path):
    stored = read("eval/report.json")
    printed = printed_json("report", FILES / "eval", "--out", tmp_path)
    assert printed.pop("usable") == {"none": {}, "yarn ×2": {}}  # 0.1 did not say it
    assert printed.pop("first_screen")["method"] is None
    assert_same(printed | {"digest": stored["digest"]}, stored)
    assert (tmp_path / "report.md").is_file()
    (rotation,) = stored["methods"][1]["frequencies"].values()
    assert_close(rotation["unscaled"], frequencies("default").inv_freq)
    assert_close(rotation["inv_freq"], frequencies("yarn", factor=2).inv_freq)


def test_resumed_evaluation_reuses_all_answers(same_versions, tmp_path):
    folder = copy_of("eval", tmp_path)
    (folder / "report.json").unlink()
    before = {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}
    results = printed_json(*EVAL, "--out", folder)
    stored = read("eval/report.json")
    added = results["perplexity"].pop("short_control")  # 0.1 had one control
    for task in results["retrieval"]:
        for samples in task["samples"].values():
            assert all(sample.pop("prompt") for sample in samples)  # of which 0.1 kept no digests
    for part in MEASURED:
        assert_same(results[part], stored[part])
    assert results["run"]["continued"]
    after = {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}
    assert before.items() <= after.items()
    assert after.pop("configs.jsonl")  # 0.1 did not note which config answered
    assert len(after) - len(before) == sum(map(len, added["losses"]))


def test_missing_answers_are_measured_again_to_the_same_values(same_versions, tmp_path):
    """Check that new answers get the stored keys; resuming alone would not show it."""
    folder = copy_of("eval", tmp_path)
    path = folder / "cache" / "answers-0.jsonl"
    first, *other_lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(other_lines))
    pieces = {
        piece: value
        for piece in sorted((folder / "cache").glob("piece-*.json"))
        if isinstance(value := json.loads(piece.read_text())["value"], float)
    }
    missing = next(iter(pieces))
    missing.unlink()
    printed_json(*EVAL, "--out", folder)
    *remaining, new_line = path.read_text().splitlines(keepends=True)
    assert remaining == other_lines
    expected, measured = json.loads(first), json.loads(new_line)
    assert measured["key"] == expected["key"]
    assert measured["answer"] == pytest.approx(expected["answer"], rel=1e-4)
    assert json.loads(missing.read_text())["value"] == pytest.approx(pieces[missing], rel=1e-4)


# -- a search's folder


SEARCH = [
    *("search", LLAMA, "--length", 512, "--strategy", "yarn-rcd", "--fitness", "recall"),
    *("--count", 2, "--held-out", 2, "--dtype", "float32", "--device-map", "cpu"),
]


def test_search_result_patches_a_model():
    result = rope_patch.Found.load(FILES / "search")
    stored = read("search/found.json")
    assert dict(result) == stored["patch"]
    assert [entry["fitness"] for entry in result.history] == [
        entry["fitness"] for entry in stored["history"]
    ]
    # The best candidate was YaRN with another ramp; the result stores it as per-pair factors.
    best = stored["candidate"]
    assert best["method"] == "yarn"
    ramp = frequencies("yarn", factor=2, **best["options"])
    assert_close(result["long_factor"], frequencies("default").inv_freq / ramp.inv_freq, rel=1e-9)
    assert result["attention_factor"] == pytest.approx(ramp.attention_factor)
    by_result, by_method = model(), model()
    rope_patch.patch(by_result, "longrope", **result)
    rope_patch.patch(by_method, "yarn", factor=2, **best["options"])
    torch.testing.assert_close(logits(by_result), logits(by_method), rtol=0, atol=1e-4)


def test_search_result_exports():
    exported = printed_json("export", LLAMA, "--engine", "vllm", "--found", FILES / "search")
    assert exported == read("search/exports.json")["vllm"]


def test_resumed_search_reuses_all_measurements(same_versions, tmp_path):
    folder = copy_of("search", tmp_path)
    before = (folder / "state.jsonl").read_bytes()
    result = printed_json(*SEARCH, "--evaluations", 2, "--out", folder)
    stored = read("search/found.json")
    for part in ("history", "patch", "candidate"):
        assert_same(result[part], stored[part])
    for name, values in stored[
        "held_out"
    ].items():  # 0.1's intervals of few samples were too narrow
        same = values.keys() - {"interval"}
        assert_same({k: result["held_out"][name][k] for k in same}, {k: values[k] for k in same})
    assert (folder / "state.jsonl").read_bytes() == before


def test_longer_search_continues_an_old_one(same_versions, tmp_path):
    folder = copy_of("search", tmp_path)
    before = rows(folder / "state.jsonl")
    result = printed_json(*SEARCH, "--evaluations", 4, "--out", folder)
    history = read("search/found.json")["history"]
    assert_same(result["history"][: len(history)], history)
    assert len(result["history"]) > len(history)
    assert rows(folder / "state.jsonl")[: len(before)] == before


def test_search_refuses_a_folder_of_other_settings(same_versions, tmp_path):
    folder = copy_of("search", tmp_path)
    status, _, stderr = run(*SEARCH, "--seed", 7, "--out", folder)
    assert status == 1
    assert "seed is 42 there and 7 here" in stderr


# -- a recommendation's folder


def test_resumed_recommendation_reuses_all_scores(same_versions, tmp_path):
    folder = copy_of("recommend", tmp_path)
    before = rows(folder / "state.jsonl")
    result = printed_json(
        *("recommend", LLAMA, "--length", 512, "--minutes", 30, "--no-search"),
        *("--samples", FILES / "samples.jsonl", "--dtype", "float32", "--device-map", "cpu"),
        *("--out", folder),
    )
    stored = read("recommend/recommendation.json")
    assert_same(result["samples"], stored["samples"])
    # Six samples told methods from the plain model by a bootstrap, and do not by today's test.
    assert (stored["method"], result["method"]) == ("ntk-by-parts", "plain")
    # Position maps are newer than the folder, so they alone are measured.
    maps = {"self-extend", "jet-long", "rerope"}
    assert maps <= {row["method"] for row in result["rows"]}
    by_name = {row["name"]: row for row in result["rows"]}
    for row in stored["rows"]:
        for part in ("method", "options", "long", "short", "prose", "leaves_short"):
            assert_same(by_name[row["name"]][part], row[part])
        assert set(by_name[row["name"]]["engines"]) - {"mlx-vlm"} == set(row["engines"])
    after = rows(folder / "state.jsonl")
    assert after[: len(before)] == before
    measured = {row["key"] for row in after[len(before) :]} - {"clock", "budget/30.0"}
    assert measured == {f'long/0/["{name}", {{}}, 2.0]' for name in maps}


def test_recommended_commands_work():
    stored = read("recommend/recommendation.json")
    patched, expected = model(), model()
    exec(stored["python"], {"rope_patch": rope_patch, "model": patched})
    rope_patch.patch(expected, stored["method"], length=512)
    assert logits(patched).equal(logits(expected))
    _, *words = stored["shell"].split()
    assert printed_json(*words) == rope_patch.export(expected, "vllm").to_dict()


# -- a fine-tuning run's folder


def finetune(folder, *words):
    return run(
        *("finetune", "--config", FILES / "recipe.yaml", "--output_dir", folder),
        *("--resume", "auto", *words),
    )


@pytest.mark.skipif(
    numpy.lib.NumpyVersion(numpy.__version__) < "2.0.0",
    reason="torch reads no random states that were written with numpy 2",
)
def test_fine_tuning_resumes_from_an_old_checkpoint(tmp_path):
    pytest.importorskip("peft")
    folder = copy_of("finetune", tmp_path)
    identity = (folder / "identity.json").read_bytes()
    truth = rows(folder / "log.jsonl")  # four steps; the checkpoint is after the second
    status, _, stderr = finetune(folder)
    assert status == 0, stderr
    log = rows(folder / "log.jsonl")
    assert log[:2] == truth[:2]  # tokens per second included: these steps did not run again
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    for row, expected in zip(log[2:], truth[2:], strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "tokens"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3), name
        assert row["tokens_per_second"] != expected["tokens_per_second"]
    assert (folder / "identity.json").read_bytes() == identity
    finished = rope_patch.load(folder / "model", dtype=torch.float32)
    assert rope_patch.current(finished).method.name == "yarn"


def test_fine_tuning_refuses_a_folder_of_another_recipe(tmp_path):
    pytest.importorskip("peft")
    folder = copy_of("finetune", tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, _, stderr = finetune(folder, "--seed", 7, "--learning_rate", 1e-5)
    assert status == 1
    assert "learning_rate was 0.001, got 1e-05" in stderr
    assert "seed was 42, got 7" in stderr
    assert {path: path.read_bytes() for path in before} == before


def test_stored_recipe_of_an_old_run_is_valid():
    status, stdout, stderr = run(
        "finetune", "--config", FILES / "finetune" / "recipe.yaml", "--plan", "--json"
    )
    assert status == 0, stderr
    assert json.loads(stdout)
