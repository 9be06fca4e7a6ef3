"""Test a recipe's settings from a file and the command line, and the refusal of bad ones."""

import json
import re
from pathlib import Path

import pytest
import yaml
from helpers.commands import run_in_this_process

from rope_patch.training import recipe_files, settings
from rope_patch.training.settings import known_keys, parse
from rope_patch.utils.strict_yaml import read_yaml

MINIMAL = {"model": "demo", "method": "yarn", "factor": 2, "data": ["novels:emma"], "max_steps": 3}


@pytest.fixture
def recipe(tmp_path):
    """Write a minimal recipe with additional keys."""

    def write(text="", **keys):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **keys}) + text)
        return str(path)

    return write


def read(path, *words):
    return parse(["--config", path, *words])[0]


def test_a_file_is_read(recipe):
    settings = read(recipe(learning_rate=1.0e-5, packing="masked", bf16=True))
    assert settings.extension.model == "demo"
    assert settings.extension.factor == 2.0
    assert settings.data.data == ["novels:emma"]
    assert settings.data.packing == "masked"
    assert settings.training.max_steps == 3
    assert settings.training.learning_rate == 1e-5
    assert settings.training.bf16 is True
    assert settings.explicit == {
        **MINIMAL, "learning_rate": 1.0e-5, "packing": "masked", "bf16": True
    }  # fmt: skip


def test_defaults_are_for_long_contexts(recipe):
    training = read(recipe()).training
    assert training.per_device_train_batch_size == 1
    assert training.gradient_checkpointing is True
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.0)
    assert training.report_to == []


def test_a_recipe_needs_no_file():
    words = [w for key in MINIMAL for w in (f"--{key}", str(MINIMAL[key]))]
    words[words.index("--data") + 1] = "novels:emma"
    settings = parse(words)[0]
    assert settings.extension.method == "yarn"
    assert settings.data.data == ["novels:emma"]


@pytest.mark.parametrize(
    "words",
    [
        ["--learning_rate", "1e-4"],
        ["--learning_rate=1e-4"],
        ["--learning-rate", "0.0001"],
        ["--learning-rate=1.0e-4"],
    ],
)
def test_the_command_line_overrides_the_file(recipe, words):
    settings = read(recipe(learning_rate=1.0e-5), *words)
    assert settings.training.learning_rate == 1e-4
    assert settings.explicit["learning_rate"] == 1e-4


def test_dashes_in_values_stay(recipe):
    settings = read(recipe(), "--output-dir", "out/my-model", "--model=some-one/a-model")
    assert settings.training.output_dir == "out/my-model"
    assert settings.extension.model == "some-one/a-model"


def test_lists_on_the_command_line(recipe):
    settings = read(recipe(), "--data", "a.txt", "b.txt", "--data_weights", "0.5", "2")
    assert settings.data.data == ["a.txt", "b.txt"]
    assert settings.data.data_weights == [0.5, 2.0]


def test_boolean_options_may_have_a_value(recipe):
    path = recipe(gradient_checkpointing=True, offload_activations=False)
    settings = read(path, "--gradient_checkpointing", "false", "--offload_activations")
    assert settings.training.gradient_checkpointing is False
    assert settings.extension.offload_activations is True


@pytest.mark.parametrize(
    "words", [[], ["--plan"], ["--loop"], ["--plan", "--json"], ["--max_steps", "7", "--loop"]]
)
def test_command_flags_are_returned(recipe, words):
    flags = parse(["--config", recipe(), *words])[1]
    assert (flags.plan, flags.loop, flags.json) == tuple(
        f"--{name}" in words for name in ("plan", "loop", "json")
    )


def test_numbers_that_yaml_reads_as_text_become_numbers(recipe):
    settings = read(recipe("learning_rate: 2e-5\ndata_weights: [1e-1]\nadam_epsilon: 1e-6\n"))
    assert settings.training.learning_rate == 2e-5
    assert settings.training.adam_epsilon == 1e-6
    assert settings.data.data_weights == [0.1]


@pytest.mark.parametrize("key", ["data", "short_data", "lora_targets", "lora_trains"])
def test_a_list_of_one_needs_no_brackets(recipe, key):
    settings = read(recipe(**{key: "norms"}))
    group = settings.data if "data" in key else settings.extension
    assert getattr(group, key) == ["norms"]


def test_an_empty_list_stays_empty(recipe):
    assert read(recipe(lora_trains=[])).extension.lora_trains == []


def test_a_key_without_a_value_removes_a_limit(recipe):
    assert read(recipe("save_total_limit:\n")).training.save_total_limit is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("options: {beta_fast: 16.0, truncate: false}", []),
        ("options: '{beta_fast: 16.0, truncate: false}'", []),
        ("", ["--options", "{beta_fast: 16.0, truncate: false}"]),
        ("options: {beta_slow: 2.0}", ['--options={"beta_fast": 16.0, "truncate": false}']),
    ],
)
def test_options_are_a_mapping_or_its_text(recipe, line, words):
    settings = read(recipe(line), *words)
    assert settings.method_options == {"beta_fast": 16.0, "truncate": False}


def test_keyword_arguments_are_a_mapping_or_json(recipe):
    keys = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    assert read(recipe(**keys)).training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    words = ["--lr_scheduler_kwargs", json.dumps({"min_lr_rate": 0.2})]
    assert read(recipe(**keys), *words).training.lr_scheduler_kwargs == {"min_lr_rate": 0.2}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, []),
        ({"options": {"beta_fast": 16.0}, "lora_rank": 8, "lora_trains": []}, []),
        ({"tokens": 1e6, "max_steps": -1, "bf16": True}, ["--options", "{beta_slow: 2.0}"]),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}, []),
        ({"short_share": 0.25, "short_data": ["a.txt"], "data_weights": [1]}, ["--seed", "3"]),
    ],
)
def test_resolved_settings_are_a_recipe_with_the_same_settings(recipe, tmp_path, keys, words):
    settings = read(recipe(**keys), *words)
    resolved_file = tmp_path / "recipe.yaml"
    resolved_file.write_text(yaml.safe_dump(settings.resolved(), sort_keys=False))
    assert read(str(resolved_file)).resolved() == settings.resolved()
    assert read(str(resolved_file)).method_options == settings.method_options


def test_a_recipe_for_gpus_is_read_without_any(recipe):
    settings = read(recipe(bf16=True))
    assert settings.training.bf16 is True
    assert settings.resolved()["use_cpu"] is False


# Refusals.


@pytest.mark.parametrize(
    ("keys", "words", "message"),
    [
        ({"learning_rte": 1.0}, [], "unknown key 'learning_rte' in .*mine.yaml .did you mean "
         "'learning_rate'.*--keys"),
        ({}, ["--lora_rnk", "8"], "unknown key 'lora_rnk' on the command line .did you mean "
         "'lora_rank'"),
        ({}, ["--lora-rnk=8"], "unknown key 'lora_rnk' on the command line"),
        ({"qwertyuiop": 1}, [], "unknown key 'qwertyuiop' in [^(]*;"),
        ({}, ["8"], "expected --key value, got '8'"),
        ({"max_steps": "abc"}, [], "max_steps: invalid int value: 'abc'"),
        ({"max_steps": 2.5}, [], "max_steps: invalid int value: '2.5'"),
        ({"max_steps": [3]}, [], r"max_steps takes one int, got \[3\]"),
        ({"factor": {"a": 1}}, [], "factor takes one float, got {'a': 1}"),
        ({"learning_rate": None}, [], "learning_rate takes one float, got None"),
        ({"data_weights": ["much"]}, [], r"data_weights takes a list of floats, got \['much'\]"),
        ({}, ["--max_steps", "abc"], "max_steps: invalid int value: 'abc'"),
        ({}, ["--max_steps"], "max_steps: expected one argument"),
        ({"bf16": "perhaps"}, [], "bf16"),
        ({"lr_scheduler_type": "cosin"}, [], "cosin"),
        ({"options": "beta_fast"}, [], "options must be keys and values.*got 'beta_fast'"),
        ({"options": [1]}, [], "options takes one text"),
        ({}, ["--options", "[1, 2]"], "options must be keys and values"),
        ({}, ["--options", "{a: "], "options is not YAML: while parsing a flow node expected"),
        ({"loss": "chunked"}, [], "loss must be one of auto, full, torch, liger, got 'chunked'"),
        ({"dtype": "float16"}, [], "dtype must be float32 or bfloat16, got 'float16'"),
        ({"lora_trains": ["heads"]}, [], "lora_trains takes embeddings and norms, got heads"),
        ({"tokens": 1e6}, [], "exactly one of max_steps and tokens, got both"),
        ({"max_steps": -1}, [], "exactly one of max_steps and tokens, got neither"),
        ({"max_steps": -1, "tokens": 0.0}, [], "tokens must be above 0"),
        ({"max_steps": -1, "tokens": float("inf")}, [], "tokens must be above 0"),
        ({"model": ""}, [], "needs the key 'model'"),
        ({"method": ""}, [], "needs the key 'method': How to extend it"),
        ({"report_to": "a_tracker"}, [], "report_to: a_tracker is not installed"),
        ({"report_to": ["a_tracker"]}, [], "report_to: a_tracker is not installed"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_a_reason(recipe, keys, words, message):
    with pytest.raises(ValueError, match=message):
        read(recipe(**keys), *words)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_train_epochs", 3, "max_steps or tokens"),
        ("load_best_model_at_end", True, "retrieval_steps"),
        ("resume_from_checkpoint", "x", "resume: auto"),
        ("auto_find_batch_size", True, "--plan"),
        ("eval_steps", 10, "retrieval_steps: N"),
        ("push_to_hub", True, "hf upload"),
        ("remove_unused_columns", False, "rows have no columns"),
        ("logging_nan_inf_filter", True, "stops the training"),
    ],
)
def test_trainer_keys_that_do_not_apply_are_refused_with_an_alternative(recipe, key, value, reason):
    with pytest.raises(ValueError, match=f"{key} is not for this: .*{reason}"):
        read(recipe(**{key: value}))
    with pytest.raises(ValueError, match=f"{key} is not for this: .*{reason}"):
        read(recipe(), f"--{key}", str(value))


def test_a_missing_file_is_refused_with_the_files_beside_it(recipe, tmp_path):
    recipe()
    with pytest.raises(ValueError, match=r"no recipe .*yarn_64k.yaml; .* has mine.yaml"):
        read(str(tmp_path / "yarn_64k.yaml"))
    with pytest.raises(ValueError, match=r"no recipe .*nowhere/yarn.yaml$"):
        read(str(tmp_path / "nowhere" / "yarn.yaml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [demo", "is not YAML"),
        (b"model: \xff\xfe", "is not YAML"),
        (b"- model\n- demo\n", "expected keys and values, got list"),
        (b"just words", "expected keys and values, got str"),
        (b"", "expected keys and values, got NoneType"),
        (b"3: 1", "unknown key '3'"),
        (b"training:\n  learning_rate: 1.0e-5\n", "unknown key 'training'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(str(path))


def test_every_key_has_a_description():
    ours = dict(list(known_keys().items())[:40])
    assert list(ours)[:3] == ["model", "method", "factor"]
    assert all(known_keys()[key] for key in ours)


# The command.


def test_the_command_lists_its_keys():
    result = run_in_this_process("finetune", "--keys")
    assert result.returncode == 0
    keys = [line.split()[0] for line in result.stdout.splitlines() if line[:1].strip()]
    assert keys[0] == "model"
    assert {"learning_rate", "packing", "resume"} <= set(keys)


def test_the_command_has_help():
    result = run_in_this_process("finetune", "--help")
    assert result.returncode == 0
    assert "--config" in result.stdout
    assert "--config smoke_cpu" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere/mine.yaml"], f"no recipe {Path('nowhere/mine.yaml')}"),
        (["--modle", "demo"], "unknown key 'modle' on the command line (did you mean 'model'?)"),
        ([], "a recipe needs the key 'model'"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
    ],
)
def test_a_bad_command_is_one_error_line(words, message):
    result = run_in_this_process("finetune", *words)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_recipes_of_the_package_are_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pi_8k").mkdir()  # a folder is no recipe
    for name, path in recipe_files.recipes().items():
        for spelling in (name, f"{name}.yaml", f"recipes/configs/{name}.yaml"):
            assert recipe_files.find_recipe(Path(spelling)) == path
        assert run_in_this_process("recipes", name).stdout == path.read_text()
    assert settings.read_recipe(Path("yarn_64k")) == yaml.safe_load(
        run_in_this_process("recipes", "yarn_64k").stdout
    )
    (tmp_path / "yarn_64k.yaml").write_text("method: linear\n")
    assert settings.read_recipe(Path("yarn_64k.yaml")) == {
        "method": "linear"
    }  # the user's file comes first


@pytest.mark.parametrize("spelling", ["yarn_65k", "yarn_65k.yaml", "recipes/configs/yarn_65k.yaml"])
def test_an_unknown_recipe_name_is_refused_with_the_closest_one(spelling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"no recipe {spelling} (did you mean 'yarn_64k'?): no such file, and the package has"
    with pytest.raises(ValueError, match=re.escape(message)):
        settings.read_recipe(Path(spelling))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pi.yaml").touch()
    with pytest.raises(ValueError, match=r"no recipe mine/yarn_64k.yaml; mine has pi.yaml"):
        settings.read_recipe(Path("mine/yarn_64k.yaml"))


def test_recipes_and_launch_files_are_listed_with_their_descriptions():
    output = run_in_this_process("recipes").stdout
    for name, path in (recipe_files.recipes() | recipe_files.launches()).items():
        line = next(line for line in output.splitlines() if line.split()[0] == name)
        assert line.split(None, 1)[1] in " ".join(path.read_text().replace("\n# ", " ").split())
    assert not recipe_files.recipes().keys() & recipe_files.launches().keys()  # one name, one file
    assert "did you mean 'fsdp2'?" in run_in_this_process("recipes", "fsdp3").stderr


@pytest.mark.parametrize(("keys", "seed"), [({}, 42), ({"data_seed": 0}, 0), ({"seed": 0}, 0)])
def test_a_seed_of_0_is_a_seed(recipe, keys, seed):
    assert read(recipe(**keys)).row_seed == seed


@pytest.mark.parametrize(
    "key", ["factor", "length", "trained_length", "train_length", "retrieval_length"]
)
def test_a_length_of_0_is_not_taken_for_no_length(recipe, key):
    with pytest.raises(ValueError, match=f"{key} must be at least 1, got 0"):
        read(recipe(**{key: 0}))


@pytest.mark.parametrize("options", [0, False])
def test_options_that_are_false_are_refused(recipe, options):
    with pytest.raises(ValueError, match="options must be keys and values"):
        read(recipe(options=options))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("factor: 4\nfactor: 8\n", "the key 'factor' stands twice"),
        ("options: {beta_fast: 4, beta_fast: 8}\n", "the key 'beta_fast' stands twice"),
        ("train_length: 0400\n", "0400 is not one number to all readers"),
        ("train_length: 4:16\n", "4:16 is not one number to all readers"),
        ("train_length: -0_17\n", "-0_17 is not one number"),
        ("data: " + "[" * 5000, "nested too deep"),
        ("model: 2024-99-99\n", "is not YAML"),
    ],
    ids=lambda value: value[:24],
)
def test_yaml_that_readers_take_differently_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        parse(["--config", str(path)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_yaml_is_read_as_before(tmp_path):
    text = "a: &x {b: 0, c: 10_0, d: 0x10}\ne: {<<: *x, b: 0.5}\nf: '0400'\ng: 1:2:x\nh: 00:aa\n"
    assert read_yaml(text) == yaml.safe_load(text)
