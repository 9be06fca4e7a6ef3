"""Test checkpoints that bring Python code: never executed unasked, and right where it is asked for.

Their weights are tiny-llama's, so transformers' own Llama says what is right.
"""

import builtins
import json
import logging
import sys

import pytest
import torch
import transformers
from helpers.commands import run_in_this_process
from helpers.remote_checkpoints import TINY, code_that_ran, write_remote_checkpoint

import rope_patch

YARN = {"method": "yarn", "factor": 4}
IDS = torch.arange(5, 45)[None]
REFUSED = r"brings Python code of its own.*trust_remote_code=True, or --trust-remote-code"
WARNING = "trust_remote_code is on"


@pytest.fixture(autouse=True, scope="module")
def own_modules(tmp_path_factory):
    """Keep copies of the code out of the user's cache, and answer transformers' question by yes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            patch.delitem(sys.modules, name)
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.setattr(builtins, "input", lambda *_: "y")
        patch.setattr(sys, "path", [*sys.path])  # it is added there
        yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture
def checkpoint(tmp_path):
    return write_remote_checkpoint(tmp_path / "ling")


@pytest.fixture
def cached_checkpoint(tmp_path):
    return write_remote_checkpoint(tmp_path / "cached", cached=True)


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits


def search_arguments(folder):
    return {"length": 512, "folder": folder, "progress": False}


FUNCTIONS = {
    "load": lambda path, _, **trust: rope_patch.load(path, **YARN, **trust),
    "diagnose": lambda path, _, **trust: rope_patch.diagnose(path, length=512, **trust),
    "evaluate": lambda path, out, **trust: rope_patch.evaluate(path, out=out, **trust),
    "compare": lambda path, out, **trust: rope_patch.compare(
        path, ["yarn"], factor=2, out=out, **trust
    ),
    "search": lambda path, out, **trust: rope_patch.search(path, **search_arguments(out), **trust),
    "recommend": lambda path, out, **trust: rope_patch.recommend(
        path, budget=1, **search_arguments(out), **trust
    ),
    "extend": lambda path, out, **trust: rope_patch.extend(path, "2x", out=out, **trust),
    "verify": lambda path, _, **trust: rope_patch.verify(TINY, against=path, **trust),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_refuse_code_that_nobody_asked_for(name, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=REFUSED):
        FUNCTIONS[name](str(checkpoint), tmp_path / "out")
    assert code_that_ran(checkpoint) == []


COMMANDS = {
    "diagnose": ("{path}",),
    "eval": ("{path}", "--method", "none", "--out", "{out}"),
    "compare": ("{path}", "--method", "yarn", "--factor", "2", "--out", "{out}"),
    "search": ("{path}", "--length", "512", "--out", "{out}"),
    "recommend": ("{path}", "--length", "512", "--minutes", "1", "--out", "{out}"),
    "extend": ("{path}", "--to", "2x", "--out", "{out}"),
    "finetune": ("--config", "smoke_cpu", "--model", "{path}", "--output_dir", "{out}"),
    "patch": ("{path}", "--method", "yarn", "--factor", "2", "--to", "{out}"),
    "export": ("{path}", "--engine", "vllm", "--method", "yarn", "--factor", "2"),
    "verify": (str(TINY), "--against", "{path}"),
    "bench": ("{path}", "--method", "none,yarn"),
    "picture": ("angles", "--model", "{path}", "--out", "{out}.svg"),
    "env": ("--check", "{path}"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_code_that_nobody_asked_for(name, checkpoint, tmp_path):
    out = tmp_path / "out"
    words = [word.format(path=checkpoint, out=out) for word in COMMANDS[name]]
    result = run_in_this_process(name, *words)
    assert result.returncode
    assert "give trust_remote_code=True, or --trust-remote-code in a command" in result.stderr
    assert code_that_ran(checkpoint) == []


def test_each_command_that_loads_a_model_has_the_option():
    for name in COMMANDS:
        words = ("--keys",) if name == "finetune" else ("--help",)
        assert "trust" in run_in_this_process(name, *words).stdout, name


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_permission_is_true_or_false(value, checkpoint):
    with pytest.raises(TypeError, match="trust_remote_code must be True or False"):
        rope_patch.load(checkpoint, **YARN, trust_remote_code=value)
    assert code_that_ran(checkpoint) == []


def test_a_permission_ends_with_its_call(checkpoint, tmp_path):
    rope_patch.load(checkpoint, **YARN, trust_remote_code=True)
    other = write_remote_checkpoint(tmp_path / "other")
    with pytest.raises(ValueError, match=REFUSED):
        rope_patch.load(other, **YARN)
    assert code_that_ran(other) == []


def test_a_loaded_model_is_patched_as_llama_is_and_warned_of_once(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        model = rope_patch.load(checkpoint, **YARN, trust_remote_code=True)
    assert [WARNING in message for message in caplog.messages].count(True) == 1
    assert str(checkpoint) in caplog.text
    assert type(model).__module__.startswith("transformers_modules.")
    expected = rope_patch.load(TINY, **YARN)
    torch.testing.assert_close(logits(model), logits(expected))
    rope_patch.patch(model, "dynamic-yarn", factor=4)
    rope_patch.patch(expected, "dynamic-yarn", factor=4)
    long = IDS.repeat(1, 10)  # beyond the trained 256 tokens, with a cache
    got, right = (
        each.generate(long, max_new_tokens=6, do_sample=False) for each in (model, expected)
    )
    assert torch.equal(got, right)


def test_a_saved_folder_has_the_code_and_needs_the_permission_again(checkpoint, tmp_path):
    model = rope_patch.load(checkpoint, **YARN, trust_remote_code=True)
    folder = tmp_path / "saved"
    rope_patch.save(model, folder)
    assert not json.loads((folder / "rope_patch.json").read_text())["native"]  # its class is bare
    assert (folder / "modeling_tiny_ling.py").is_file()
    with pytest.raises(ValueError, match=REFUSED):
        rope_patch.load(folder)
    again = rope_patch.load(folder, trust_remote_code=True)
    torch.testing.assert_close(logits(again), logits(model))


def test_a_patched_checkpoint_leaves_the_source_as_it_was(checkpoint, tmp_path):
    before = {p.name: p.read_bytes() for p in checkpoint.glob("*.py")}
    folder = tmp_path / "patched"
    words = ("patch", checkpoint, "--method", "yarn", "--factor", "4", "--to", folder)
    result = run_in_this_process(*words, "--trust-remote-code")
    assert result.returncode == 0, result.stderr
    assert f"rope_patch.load({str(folder)!r}, trust_remote_code=True)" in result.stdout
    assert WARNING in result.stderr
    assert {p.name: p.read_bytes() for p in checkpoint.glob("*.py")} == before
    assert (folder / "configuration_tiny_ling.py").stat().st_ino != (
        checkpoint / "configuration_tiny_ling.py"
    ).stat().st_ino
    again = rope_patch.load(folder, trust_remote_code=True)
    torch.testing.assert_close(logits(again), logits(rope_patch.load(TINY, **YARN)))


def test_diagnose_names_the_permission_in_its_lines(checkpoint):
    diagnosis = rope_patch.diagnose(checkpoint, length=512, trust_remote_code=True)
    assert diagnosis.healthy
    advice = diagnosis.advice
    assert advice.python.endswith('"dynamic-yarn", length=512, trust_remote_code=True)')
    assert advice.shell.endswith("--length 512 --trust-remote-code")


def test_an_export_that_the_code_would_not_read_is_refused(checkpoint):
    model = rope_patch.load(checkpoint, **YARN, trust_remote_code=True)
    with pytest.raises(rope_patch.Refused, match=r"TinyLingRotaryEmbedding.* does not rotate by"):
        rope_patch.export(model, "transformers")


def change_code(folder):
    modeling = folder / "modeling_tiny_ling.py"
    modeling.write_text(modeling.read_text() + "\n# changed\n")


def test_code_that_was_edited_meanwhile_is_not_taken_for_the_new(checkpoint):
    rope_patch.load(checkpoint, **YARN, trust_remote_code=True)
    change_code(checkpoint)
    with pytest.raises(rope_patch.Refused, match="was changed after this process loaded it"):
        rope_patch.load(checkpoint, **YARN, trust_remote_code=True)


def evaluate(path, out):
    words = ("--method", "none,yarn", "--factor", "2", "--lengths", "200", "--samples", "1")
    words += ("--tasks", "rp_recall_ll", "--out", out, "--trust-remote-code")
    result = run_in_this_process("eval", path, *words)
    assert result.returncode == 0, result.stderr
    answers = sum(len(p.read_text().splitlines()) for p in (out / "cache").glob("answers-*"))
    return json.loads((out / "report.json").read_text()), answers


def test_an_evaluation_records_the_code_and_asks_again_if_it_changed(checkpoint, tmp_path):
    first, answers = evaluate(checkpoint, tmp_path / "out")
    plain = rope_patch.evaluate(
        str(TINY),
        ["none", "yarn"],
        factor=2,
        lengths=(200,),
        samples=1,
        tasks=("rp_recall_ll",),
        out=tmp_path / "plain",
    )
    assert "code" not in plain.results["run"]
    for ours, theirs in zip(first["retrieval"], plain.results["retrieval"], strict=True):
        for label, rows in ours["samples"].items():
            scores = [[row["score"] for row in each] for each in (rows, theirs["samples"][label])]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    again, same_answers = evaluate(checkpoint, tmp_path / "out")
    assert again["run"]["code"] == first["run"]["code"]
    assert same_answers == answers > 0
    other = write_remote_checkpoint(tmp_path / "other")
    change_code(other)
    changed, more_answers = evaluate(other, tmp_path / "out")  # the same weights
    assert changed["run"]["code"] != first["run"]["code"]
    assert more_answers == 2 * answers


def test_a_training_continues_under_the_permission_it_began_with(checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ("finetune", "--config", "smoke_cpu", "--model", checkpoint, "--output_dir", out)
    words += ("--max_steps", "1", "--resume", "auto")
    result = run_in_this_process(*words, "--trust-remote-code")
    assert result.returncode == 0, result.stderr
    assert "trust_remote_code: true" in (out / "recipe.yaml").read_text()
    assert (out / "model" / "modeling_tiny_ling.py").is_file()
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("auto_map")  # transformers' class now, with the same weights
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused = run_in_this_process(*words)
    assert refused.returncode
    assert "trust_remote_code" in refused.stderr


REASON = r"it rotates by TinyLingRotaryEmbedding, in each of 2 modules, such as " + (
    r"model\.layers\.0\.self_attn\.rotary_emb, which caches tables of its own"
)


def test_tables_cached_in_every_layer_are_refused_for_what_they_are(cached_checkpoint):
    plain = transformers.AutoModelForCausalLM.from_pretrained(TINY).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        cached_checkpoint, trust_remote_code=True
    ).eval()
    torch.testing.assert_close(logits(model), logits(plain))  # it does rotate
    for request in (YARN, {"method": "dynamic-yarn"}, {"method": "linear", "factor": 2}):
        with pytest.raises(rope_patch.Refused, match=REASON) as refused:
            rope_patch.patch(model, **request)
        assert "reads any length" not in str(refused.value)
        assert "cos_cached, sin_cached" in str(refused.value)  # made by the forward above
    with pytest.raises(rope_patch.Refused, match=REASON):
        rope_patch.load(cached_checkpoint, **YARN, trust_remote_code=True)
    diagnosis = rope_patch.diagnose(cached_checkpoint, trust_remote_code=True)
    found = next(each for each in diagnosis.findings if each.code == "no-model")
    assert "which caches tables of its own" in found.evidence
    torch.testing.assert_close(logits(model), logits(plain))


def test_code_that_needs_a_missing_package_says_which(checkpoint):
    modeling = checkpoint / "modeling_tiny_ling.py"
    modeling.write_text("import no_such_package_of_code\n" + modeling.read_text())
    with pytest.raises(rope_patch.Refused, match=r"imports what is not here.*no_such_package"):
        rope_patch.load(checkpoint, **YARN, trust_remote_code=True)


def test_transformers_own_class_is_taken_where_the_permission_is_not_given(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    model = rope_patch.load(checkpoint, **YARN)
    assert type(model) is transformers.LlamaForCausalLM
    assert code_that_ran(checkpoint) == []
