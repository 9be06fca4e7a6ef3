"""Commands for another engine: lm-eval's own parser and transformers say what they mean."""

import copy
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation import vllm_commands
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import external_tasks, lm_eval_tasks
from rope_patch.evaluation.request import EvalRequest
from rope_patch.methods import registered_methods
from rope_patch.patching import check

ASSETS = Path(__file__).parents[1] / "assets"
LLAMA = str(ASSETS / "tiny-llama")
MODELS = ("tiny-llama", "tiny-gemma3", "tiny-qwen3")
STRETCHES = [1.0 + i / 4 for i in range(16)]
OPTIONS = {  # without which a method has nothing to say
    "longrope": {"long_factor": STRETCHES, "short_factor": STRETCHES},
    "mixed-longrope": {"long_factor": STRETCHES},
}


def request(tmp_path, **asked):
    given = {"model": LLAMA, "methods": ("none", "yarn"), "factor": 4.0, "lengths": (512, 1024)}
    given |= {"tasks": ("rp_niah_single_1", "rp_vt_ll"), "samples": 1, "folder": tmp_path}
    return EvalRequest(**(given | asked))


def parsed(command, monkeypatch):
    """What lm-eval's command line makes of a command."""
    from lm_eval._cli.harness import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    words = shlex.split(command)
    assert words[0] == "lm_eval"
    monkeypatch.setattr(sys, "argv", words)
    return EvaluatorConfig.from_cli(HarnessCLI().parse_args())


def runnable(lines):
    return [line for line in lines if not line.startswith("#")]


class TestCommands:
    def test_lm_eval_parses_what_is_meant(self, tmp_path, monkeypatch):
        lines = vllm_commands.commands(
            "vllm", request(tmp_path, depths=(20, 80), per_text=2, seed=7)
        )
        assert len(lines) == 4  # two methods at two lengths
        read = [parsed(line, monkeypatch) for line in lines]
        assert [(c.model_args["max_model_len"], c.metadata["length"]) for c in read] == [
            (512, 512),
            (1024, 1024),
        ] * 2
        assert len({c.output_path for c in read}) == 4
        for found in read:
            assert found.model == "vllm"
            assert found.model_args["pretrained"] == LLAMA
            assert found.model_args["dtype"] == "auto"
            assert found.batch_size == "auto"
            assert found.log_samples
            assert found.limit is None
            assert found.tasks == ["rp_niah_single_1", "rp_vt_ll"]
            assert found.metadata["depths"] == [20, 80]
            assert (found.metadata["samples"], found.metadata["seed"]) == (1, 7)
            assert found.metadata["per_text"] == 2
        assert read[0].model_args["hf_overrides"] == {"max_position_embeddings": 512}
        assert read[3].model_args["hf_overrides"]["rope_parameters"]["rope_type"] == "yarn"

    def test_lm_eval_finds_the_tasks_where_they_are(self, tmp_path, monkeypatch):
        from lm_eval.tasks import TaskManager

        asked = request(tmp_path, tasks=("rp_ruler", "rp_hard", "rp_short"))
        lines = vllm_commands.commands("vllm", asked)
        wanted = {task for line in lines for task in parsed(line, monkeypatch).tasks}
        path = parsed(lines[0], monkeypatch).include_path
        known = TaskManager(include_path=path, include_defaults=False).all_tasks
        assert len(wanted) > 13
        assert wanted <= set(known)

    def test_lm_eval_knows_the_engine(self):
        import lm_eval.models
        from lm_eval.api import registry

        assert set(vllm_commands.ENGINES) <= set(lm_eval.models.MODEL_MAPPING)
        if importlib.util.find_spec("vllm") is None:
            with pytest.raises(ImportError, match="vllm"):  # known, and not installed here
                registry.get_model("vllm")
        else:
            assert registry.get_model("vllm").__name__ == "VLLM"

    def test_vllm_takes_every_argument(self, tmp_path, monkeypatch):
        # Its signature, from the source: importing it needs vLLM.
        import ast

        import lm_eval.models

        source = Path(lm_eval.models.__file__).with_name("vllm_causallms.py").read_text()
        (init,) = (
            function
            for kind in ast.parse(source).body
            if isinstance(kind, ast.ClassDef) and kind.name == "VLLM"
            for function in kind.body
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        )
        named = {argument.arg for argument in init.args.args}
        found = parsed(vllm_commands.commands("vllm", request(tmp_path))[0], monkeypatch)
        # vLLM's own LLM gets the rest.
        assert set(found.model_args) - named == {"hf_overrides"}
        assert init.args.kwarg is not None

    def test_tasks_that_lm_eval_makes_at_a_length(self, tmp_path, monkeypatch):
        asked = request(tmp_path, methods=("none",), tasks=("niah_single_1", "arc_easy"), samples=3)
        read = [parsed(line, monkeypatch) for line in vllm_commands.commands("vllm", asked)]
        assert [c.tasks for c in read] == [["niah_single_1"]] * 2 + [["arc_easy"]]
        assert [c.metadata.get("max_seq_lengths") for c in read] == [[512], [1024], None]
        assert all(c.limit == 3 and c.metadata["pretrained"] == LLAMA for c in read)

    def test_what_only_our_engine_measures_is_noted(self, tmp_path):
        tasks = ("perplexity", "speed", "rp_vt")
        asked = request(tmp_path, tasks=tasks, controls=True, precision=0.05)
        lines = vllm_commands.commands("vllm", asked)
        notes = [line for line in lines if line.startswith("#")]
        assert [note.split()[1] for note in notes] == [
            "perplexity",
            "speed",
            "controls",
            "precision",
        ]
        assert len(runnable(lines)) == 4

    @pytest.mark.parametrize("task", ["perplexity", "key_tokens", "sliding", "speed"])
    def test_nothing_but_that_is_refused(self, tmp_path, task):
        with pytest.raises(ValueError, match=f"vllm cannot run {task}: .*transformers"):
            vllm_commands.commands("vllm", request(tmp_path, tasks=(task,)))

    def test_unknown_engines_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"unknown engine 'sglang': expected vllm"):
            vllm_commands.commands("sglang", request(tmp_path))

    @pytest.mark.parametrize(
        "method", ["dynamic", "dynamic-yarn", "mixed-ntk", "mixed-yarn", "nope"]
    )
    def test_methods_that_vllm_reads_otherwise_are_refused(self, tmp_path, method):
        with pytest.raises(ValueError, match=rf"vllm cannot run {method}.*leave it out, or"):
            vllm_commands.commands("vllm", request(tmp_path, methods=(method,)))

    def test_a_saved_patch_that_no_config_says_is_refused(self, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        rope_patch.patch(model, "dynamic-yarn")
        rope_patch.save(model, tmp_path / "saved")
        asked = request(tmp_path, model=str(tmp_path / "saved"), methods=("none",), factor=None)
        with pytest.raises(ValueError, match=r"as it was saved.*dynamic-yarn"):
            vllm_commands.commands("vllm", asked)


def static():
    """The methods that a config says and that do not follow the length."""
    found = []
    for name, kind in registered_methods().items():
        method = kind(**({} if kind.is_dynamic else {"factor": 2.0}), **OPTIONS.get(name, {}))
        changes = name not in ("default", "nope")  # nothing, or more than vLLM takes
        if changes and method.has_config_form and not method.is_length_dependent(256):
            found.append(name)
    return found


class TestOverrides:
    @pytest.mark.parametrize("asset", MODELS)
    @pytest.mark.parametrize("name", static())
    def test_transformers_gets_the_same_logits_from_them(self, asset, name):
        path = ASSETS / asset
        options = OPTIONS.get(name, {})
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        ids = torch.randint(3, 500, (1, 400), generator=torch.Generator().manual_seed(0))
        for length in (512, 1024):  # 1,024 is beyond what vLLM lets YaRN reach
            config = AutoConfig.from_pretrained(path)
            plan = check(model, name, factor=2.0, **options)
            found = json.loads(json.dumps(vllm_commands.config_overrides(config, plan, length)))
            config.update(copy.deepcopy(found))
            assert config.max_position_embeddings >= length
            plain = AutoModelForCausalLM.from_pretrained(path, config=config).eval()
            with torch.no_grad(), rope_patch.patch(model, name, factor=2.0, **options):
                expected = model(ids).logits
            # Frequencies round otherwise where they are spelled otherwise; every method here moves
            # some logit by more than 1.
            with torch.no_grad():
                assert (plain(ids).logits - expected).abs().max() < 2e-3
                assert (model(ids).logits - expected).abs().max() > 1

    def test_there_are_static_methods(self):
        assert {"linear", "ntk", "yarn", "longrope", "llama3", "abf"} <= set(static())

    def test_an_attention_factor_is_said_as_vllm_reads_it(self):
        # Its YaRN ignores attention_factor; its longrope reads these two and nothing else.
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        for method, options in (("yarn", {"attention_factor": 1.25}), ("ntk-by-parts", {})):
            plan = check(model, method, factor=4.0, **options)
            rope = vllm_commands.config_overrides(model.config, plan, 512)["rope_parameters"]
            assert rope["rope_type"] == "longrope"
            wanted = options.get("attention_factor", 1.0)
            assert rope["short_mscale"] == rope["long_mscale"] == wanted
            assert rope["short_factor"] == rope["long_factor"]

    def test_yarn_is_yarn_as_far_as_vllm_reaches(self):
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        plan = check(model, "yarn", factor=2.0)
        kinds = {
            length: vllm_commands.config_overrides(model.config, plan, length)["rope_parameters"][
                "rope_type"
            ]
            for length in (512, 513)
        }
        assert kinds == {512: "yarn", 513: "longrope"}

    def test_they_are_nested_as_the_config_is(self):
        from transformers import Gemma3Config

        text = json.loads((ASSETS / "tiny-gemma3" / "config.json").read_text())
        config = Gemma3Config(text_config=text)
        model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-gemma3")
        found = vllm_commands.config_overrides(config, check(model, "linear", factor=2.0), 512)
        assert list(found) == ["text_config"]
        rope = found["text_config"]["rope_parameters"]
        assert rope["full_attention"]["rope_type"] == "linear"
        assert rope["sliding_attention"] == text["rope_parameters"]["sliding_attention"]

    def test_a_model_as_it_is_stays_as_it_is(self):
        config = AutoConfig.from_pretrained(LLAMA)
        assert vllm_commands.config_overrides(config, None, 256) == {}


class TestRun:
    @pytest.mark.slow
    def test_lm_eval_runs_the_command_and_scores_as_we_do(self, tmp_path):
        """In a process of its own, with transformers in vLLM's place."""
        names = ("rp_niah_single_1", "rp_niah_single_2_ll")
        asked = request(tmp_path, methods=("linear",), lengths=(512,), factor=2.0, tasks=names)
        (line,) = vllm_commands.commands("vllm", asked)
        words = shlex.split(line)
        arguments = json.loads(words[words.index("--model_args") + 1])
        changed = tmp_path / "model"
        changed.mkdir()
        for file in Path(LLAMA).iterdir():
            (changed / file.name).write_bytes(file.read_bytes())
        said = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps(said | arguments["hf_overrides"]))
        mine = {"pretrained": str(changed), "max_length": arguments["max_model_len"]}
        words[words.index("--model_args") + 1] = json.dumps(mine)
        words[words.index("vllm")] = "hf"
        words[words.index("--batch_size") + 1] = "1"
        ran = subprocess.run(
            [sys.executable, "-m", *words, "--device", "cpu"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            timeout=200,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        theirs = {}
        for file in Path(words[words.index("--output_path") + 1]).rglob("samples_*.jsonl"):
            (row,) = map(json.loads, file.read_text().splitlines())
            theirs[row["doc"]["task"]] = row

        model = AutoModelForCausalLM.from_pretrained(LLAMA).eval()
        rope_patch.patch(model, "linear", factor=2.0)
        tokenizer = AutoTokenizer.from_pretrained(LLAMA)
        for name in names:
            lm = LongContextLM(model, tokenizer, 512, {})
            built = lm_eval_tasks.build(
                name, tokenizer, [512], 1, list(asked.depths), seed=42, per_text=1
            )
            results = lm_eval_tasks.evaluate(lm, built)
            ((sample,),) = results["samples"].values()
            row = theirs[sample["doc"]["task"]]
            assert row["doc"]["id"] == sample["doc"]["id"]
            assert row["score"] == sample["score"]
            if name.endswith("_ll"):
                likelihood = sample["target_log_likelihood"]
                assert row["target_log_likelihood"] == pytest.approx(likelihood, abs=1e-2)
            else:
                assert str(row["resps"][0][0]) == str(sample["resps"][0][0])


def test_harness_spells_lengths_for_engines():
    assert external_tasks.length_metadata("ruler", 8192) == {"max_seq_lengths": [8192]}
