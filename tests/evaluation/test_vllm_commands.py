"""Test the lm-eval commands for vLLM with lm-eval's parser, and their overrides in transformers."""

import copy
import functools
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.user_tasks import write_tasks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.entry_points import check
from rope_patch.evaluation import EvalRequest, LongContextLM, config_overrides, engine_commands
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.methods import registered_methods

ASSETS = Path(__file__).parents[1] / "assets"
LLAMA = str(ASSETS / "tiny-llama")
MODELS = ("tiny-gemma3", "tiny-qwen3")
STRETCHES = [1.0 + i / 4 for i in range(16)]
OPTIONS = {  # those that a method requires
    "longrope": {"long_factor": STRETCHES, "short_factor": STRETCHES},
    "mixed-longrope": {"long_factor": STRETCHES},
    "dpe": {"groups": [2]},
}


def request(tmp_path, **changes):
    arguments = {"model": LLAMA, "methods": ("none", "yarn"), "factor": 4.0, "lengths": (512, 1024)}
    arguments |= {"tasks": ("rp_niah_single_1", "rp_vt_ll"), "samples": 1, "folder": tmp_path}
    return EvalRequest(**(arguments | changes))


def parse_command(command, monkeypatch):
    """Return the configuration that lm-eval's command line parses from a command."""
    from lm_eval._cli.harness import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    words = shlex.split(command)
    assert words[0] == "lm_eval"
    monkeypatch.setattr(sys, "argv", words)
    return EvaluatorConfig.from_cli(HarnessCLI().parse_args())


def commands(tmp_path, **changes):
    return engine_commands("vllm", request(tmp_path, **changes))


def runnable(lines):
    return [line for line in lines if not line.startswith("#")]


class TestCommands:
    def test_lm_eval_parses_the_commands(self, tmp_path, monkeypatch):
        lines = commands(tmp_path, depths=(20, 80), per_text=2, seed=7)
        assert len(lines) == 4  # two methods at two lengths
        configs = [parse_command(line, monkeypatch) for line in lines]
        assert [(c.model_args["max_model_len"], c.metadata["length"]) for c in configs] == [
            (512, 512),
            (1024, 1024),
        ] * 2
        assert len({c.output_path for c in configs}) == 4
        for config in configs:
            assert config.model == "vllm"
            assert config.model_args["pretrained"] == LLAMA
            assert config.model_args["dtype"] == "auto"
            assert config.batch_size == "auto"
            assert config.log_samples
            assert config.limit is None
            assert config.tasks == ["rp_niah_single_1", "rp_vt_ll"]
            assert config.metadata["depths"] == [20, 80]
            assert (config.metadata["samples"], config.metadata["seed"]) == (1, 7)
            assert config.metadata["per_text"] == 2
        assert configs[0].model_args["hf_overrides"] == {"max_position_embeddings": 512}
        assert configs[3].model_args["hf_overrides"]["rope_parameters"]["rope_type"] == "yarn"

    def test_lm_eval_finds_the_tasks_in_the_include_path(self, tmp_path, monkeypatch):
        from lm_eval.tasks import TaskManager

        eval_request = request(tmp_path, tasks=("rp_ruler", "rp_hard", "rp_short"))
        lines = engine_commands("vllm", eval_request)
        task_names = {task for line in lines for task in parse_command(line, monkeypatch).tasks}
        path = parse_command(lines[0], monkeypatch).include_path
        known_tasks = TaskManager(include_path=path, include_defaults=False).all_tasks
        assert len(task_names) > 13
        assert task_names <= set(known_tasks)

    def test_lm_eval_knows_the_engine(self):
        import lm_eval.models
        from lm_eval.api import registry

        assert "vllm" in lm_eval.models.MODEL_MAPPING
        if importlib.util.find_spec("vllm") is None:
            with pytest.raises(ImportError, match="vllm"):  # registered, but not installed
                registry.get_model("vllm")
        else:
            assert registry.get_model("vllm").__name__ == "VLLM"

    def test_vllm_takes_every_argument(self, tmp_path, monkeypatch):
        # Read the signature from the source, since importing the class needs vLLM.
        import ast

        import lm_eval.models

        source = Path(lm_eval.models.__file__).with_name("vllm_causallms.py").read_text()
        (init,) = (
            function
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == "VLLM"
            for function in node.body
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        )
        parameter_names = {argument.arg for argument in init.args.args}
        config = parse_command(commands(tmp_path)[0], monkeypatch)
        # vLLM's own LLM gets the rest.
        assert set(config.model_args) - parameter_names == {"hf_overrides"}
        assert init.args.kwarg is not None

    @pytest.mark.slow  # lm-eval reads all of its own tasks first
    def test_lm_eval_tasks_get_lengths_and_a_limit(self, tmp_path, monkeypatch):
        eval_request = request(
            tmp_path, methods=("none",), tasks=("niah_single_1", "arc_easy"), samples=3
        )
        configs = [
            parse_command(line, monkeypatch) for line in engine_commands("vllm", eval_request)
        ]
        assert [c.tasks for c in configs] == [["niah_single_1"]] * 2 + [["arc_easy"]]
        assert [c.metadata.get("max_seq_lengths") for c in configs] == [[512], [1024], None]
        assert all(c.limit == 3 and c.metadata["pretrained"] == LLAMA for c in configs)

    def test_users_tasks_get_their_folder(self, tmp_path, monkeypatch):
        folder = write_tasks(tmp_path / "tasks")
        eval_request = request(
            tmp_path,
            tasks=("my_tag", "rp_vt_ll"),
            include_paths=(folder,),
            methods=("none",),
            samples=3,
        )
        lines = engine_commands("vllm", eval_request)
        configs = [parse_command(line, monkeypatch) for line in lines]
        own = [c for c in configs if c.tasks != ["rp_vt_ll"]]
        assert [c.tasks for c in own] == [["my_lists"], ["my_lists"], ["my_sums"]]
        assert [c.metadata.get("length") for c in own] == [512, 1024, None]
        assert {str(c.include_path) for c in own} == {folder}
        assert all(c.limit == 3 and c.metadata["pretrained"] == LLAMA for c in own)
        assert len({c.output_path for c in configs}) == len(configs) == 5

    def test_measures_that_vllm_lacks_become_comments(self, tmp_path):
        tasks = ("perplexity", "speed", "rp_vt")
        eval_request = request(tmp_path, tasks=tasks, controls=True, precision=0.05)
        lines = engine_commands("vllm", eval_request)
        notes = [line for line in lines if line.startswith("#")]
        assert [note.split()[1] for note in notes] == [
            "perplexity",
            "speed",
            "controls",
            "precision",
        ]
        assert len(runnable(lines)) == 4
        growing = request(tmp_path, tasks=("rp_vt",), methods=("none", "yarn"), until_decided=True)
        notes = [n for n in engine_commands("vllm", growing) if n.startswith("#")]
        assert [note.split()[1] for note in notes] == ["until_decided"]

    @pytest.mark.parametrize("task", ["perplexity", "key_tokens", "sliding", "speed"])
    def test_a_request_of_only_measures_that_vllm_lacks_is_refused(self, tmp_path, task):
        with pytest.raises(ValueError, match=f"{task}: .*transformers"):
            commands(tmp_path, tasks=(task,))

    def test_unknown_engines_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="'sglang': expected vllm"):
            engine_commands("sglang", request(tmp_path))

    @pytest.mark.parametrize(
        "method", ["dynamic", "dynamic-yarn", "mixed-ntk", "mixed-yarn", "nope"]
    )
    def test_methods_that_vllm_rotates_differently_are_refused(self, tmp_path, method):
        with pytest.raises(ValueError, match=rf"vllm cannot run {method}.*leave it out, or"):
            commands(tmp_path, methods=(method,))

    def test_a_refused_method_leaves_the_others_their_commands(self, tmp_path):
        alone = commands(tmp_path, methods=("none", "yarn"))
        lines = commands(tmp_path, methods=("none", "dynamic-yarn", "yarn"))
        assert runnable(lines) == runnable(alone)
        (comment,) = set(lines) - set(alone)
        assert comment.startswith("# vllm cannot run dynamic-yarn")

    def test_a_saved_patch_without_native_form_is_refused(self, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        rope_patch.patch(model, "dynamic-yarn")
        rope_patch.save(model, tmp_path / "saved")
        eval_request = request(
            tmp_path, model=str(tmp_path / "saved"), methods=("none",), factor=None
        )
        with pytest.raises(ValueError, match=r"as it was saved.*dynamic-yarn"):
            engine_commands("vllm", eval_request)


def static_methods():
    """Return the names of the static methods that a config can express."""
    names = []
    for name, method_class in registered_methods().items():
        method = method_class(
            **({} if method_class.is_dynamic else {"factor": 2.0}), **OPTIONS.get(name, {})
        )
        changes = name not in ("default", "nope")  # nothing, or more than vLLM takes
        if changes and method.has_config_form and not method.is_length_dependent(256):
            names.append(name)
    return names


@pytest.fixture(scope="module")
def plain():
    """Return a function that returns a plain model, and its logits of some ids, read once."""
    ids = torch.randint(3, 500, (1, 400), generator=torch.Generator().manual_seed(0))

    @functools.cache
    def read(asset):
        model = AutoModelForCausalLM.from_pretrained(ASSETS / asset).eval()
        with torch.no_grad():
            return model, ids, model(ids).logits

    return read


class TestOverrides:
    @pytest.mark.parametrize(
        ("asset", "name"),
        [
            *(("tiny-llama", name) for name in static_methods()),
            *((asset, name) for asset in MODELS for name in ("linear", "yarn", "longrope")),
        ],
    )
    def test_overrides_give_the_same_logits_in_transformers(self, plain, asset, name):
        path = ASSETS / asset
        options = OPTIONS.get(name, {})
        model, ids, before = plain(asset)
        plan = check(model, name, factor=2.0, **options)
        with torch.no_grad(), rope_patch.patch(model, name, factor=2.0, **options):
            expected = model(ids).logits
        # A config's frequencies may round differently; every method here moves some logit by more,
        # `clipped` the least.
        assert (before - expected).abs().max() > 0.1
        for length in (512, 1024):  # 1,024 is beyond what vLLM lets YaRN reach
            config = AutoConfig.from_pretrained(path)
            overrides = json.loads(json.dumps(config_overrides(config, plan, length)))
            config.update(copy.deepcopy(overrides))
            assert config.max_position_embeddings >= length
            native = AutoModelForCausalLM.from_pretrained(path, config=config).eval()
            with torch.no_grad():
                assert (native(ids).logits - expected).abs().max() < 2e-3

    def test_there_are_static_methods(self):
        assert {"linear", "ntk", "yarn", "longrope", "llama3", "abf"} <= set(static_methods())

    @pytest.mark.parametrize(
        ("method", "options", "expected"),
        [("yarn", {"attention_factor": 1.25}, 1.25), ("ntk-by-parts", {}, 1.0)],
    )
    def test_an_attention_factor_has_the_names_that_vllm_reads(self, method, options, expected):
        # Of YaRN, vLLM reads attention_factor from 0.30 on, and multiplied by attn_factor before.
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        plan = check(model, method, factor=4.0, **options)
        rope = config_overrides(model.config, plan, 512)["rope_parameters"]
        assert (rope["rope_type"], rope["attention_factor"]) == ("yarn", expected)
        assert rope["attn_factor"] * (0.1 * math.log(4) + 1) == pytest.approx(expected, rel=1e-9)

    def test_yarn_becomes_longrope_beyond_the_length_that_vllm_supports(self):
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        plan = check(model, "yarn", factor=2.0)
        rope_types = {
            length: config_overrides(model.config, plan, length)["rope_parameters"]["rope_type"]
            for length in (512, 513)
        }
        assert rope_types == {512: "yarn", 513: "longrope"}

    def test_overrides_are_nested_like_the_config(self):
        from transformers import Gemma3Config

        text_config = json.loads((ASSETS / "tiny-gemma3" / "config.json").read_text())
        config = Gemma3Config(text_config=text_config)
        model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-gemma3")
        overrides = config_overrides(config, check(model, "linear", factor=2.0), 512)
        assert list(overrides) == ["text_config"]
        rope = overrides["text_config"]["rope_parameters"]
        assert rope["full_attention"]["rope_type"] == "linear"
        assert rope["sliding_attention"] == text_config["rope_parameters"]["sliding_attention"]

    def test_the_plain_model_needs_no_overrides(self):
        config = AutoConfig.from_pretrained(LLAMA)
        assert config_overrides(config, None, 256) == {}


class TestRun:
    @pytest.mark.slow
    def test_lm_eval_runs_the_command_to_the_same_scores(self, tmp_path):
        """Run in a separate process with transformers in place of vLLM."""
        names = ("rp_niah_single_1", "rp_niah_single_2_ll")
        eval_request = request(
            tmp_path, methods=("linear",), lengths=(512,), factor=2.0, tasks=names
        )
        (line,) = engine_commands("vllm", eval_request)
        words = shlex.split(line)
        arguments = json.loads(words[words.index("--model_args") + 1])
        model_folder = tmp_path / "model"
        model_folder.mkdir()
        for file in Path(LLAMA).iterdir():
            (model_folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((model_folder / "config.json").read_text())
        (model_folder / "config.json").write_text(json.dumps(config | arguments["hf_overrides"]))
        model_args = {"pretrained": str(model_folder), "max_length": arguments["max_model_len"]}
        words[words.index("--model_args") + 1] = json.dumps(model_args)
        words[words.index("vllm")] = "hf"
        words[words.index("--batch_size") + 1] = "1"
        process = subprocess.run(
            [sys.executable, "-m", *words, "--device", "cpu"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            timeout=200,
        )
        assert process.returncode == 0, process.stderr[-2000:]
        lm_eval_rows = {}
        for file in Path(words[words.index("--output_path") + 1]).rglob("samples_*.jsonl"):
            (row,) = map(json.loads, file.read_text().splitlines())
            lm_eval_rows[row["doc"]["task"]] = row

        model = AutoModelForCausalLM.from_pretrained(LLAMA).eval()
        rope_patch.patch(model, "linear", factor=2.0)
        tokenizer = AutoTokenizer.from_pretrained(LLAMA)
        for name in names:
            lm = LongContextLM(model, tokenizer, 512, {})
            tasks = lm_eval_tasks.build(
                name, tokenizer, [512], 1, list(eval_request.depths), seed=42, per_text=1
            )
            results = lm_eval_tasks.evaluate(lm, tasks)
            ((sample,),) = results["samples"].values()
            row = lm_eval_rows[sample["doc"]["task"]]
            assert row["doc"]["id"] == sample["doc"]["id"]
            assert row["score"] == sample["score"]
            if name.endswith("_ll"):
                likelihood = sample["target_log_likelihood"]
                assert row["target_log_likelihood"] == pytest.approx(likelihood, abs=1e-2)
            else:
                assert str(row["resps"][0][0]) == str(sample["resps"][0][0])
