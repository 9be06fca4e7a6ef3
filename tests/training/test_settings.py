"""Test a recipe's settings from a file and the command line, and the refusal of bad ones."""

from pathlib import Path

import pytest
import yaml
from helpers.commands import run_in_this_process

from rope_patch.training import find_recipe, known_keys, parse_settings, read_recipe

ROOT = Path(__file__).parents[2]
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
    return parse_settings(["--config", path, *words])[0]


def test_a_file_is_read_with_defaults_for_long_contexts(recipe):
    keys = {"learning_rate": 1.0e-5, "packing": "masked", "bf16": True}
    settings = read(recipe(**keys))
    assert settings.extension.model == "demo"
    assert settings.extension.factor == 2.0
    assert settings.data.data == ["novels:emma"]
    assert settings.data.packing == "masked"
    assert settings.explicit == MINIMAL | keys
    training = settings.training
    assert (training.max_steps, training.learning_rate, training.bf16) == (3, 1e-5, True)
    assert (training.per_device_train_batch_size, training.gradient_checkpointing) == (1, True)
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.0)
    assert training.report_to == []
    assert settings.resolved()["use_cpu"] is False  # although there may be no GPU


def test_a_recipe_needs_no_file():
    words = [w for key in MINIMAL for w in (f"--{key}", str(MINIMAL[key]))]
    words[words.index("--data") + 1] = "novels:emma"
    settings = parse_settings(words)[0]
    assert settings.extension.method == "yarn"
    assert settings.data.data == ["novels:emma"]


OPTIONS = {"beta_fast": 16.0, "truncate": False}
SCHEDULE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
# Keys and text of a file, words of the command line, a key, its value.
READ = [
    *[
        ({"learning_rate": 1.0e-5}, "", words, "learning_rate", 1e-4)
        for words in (
            ["--learning_rate", "1e-4"],
            ["--learning_rate=1e-4"],
            ["--learning-rate", "0.0001"],
            ["--learning-rate=1.0e-4"],
        )
    ],
    ({}, "", ["--output-dir", "out/my-model"], "output_dir", "out/my-model"),  # dashes stay
    ({}, "", ["--model=some-one/a-model"], "model", "some-one/a-model"),
    ({}, "", ["--data", "a.txt", "b.txt"], "data", ["a.txt", "b.txt"]),
    ({}, "", ["--data_weights", "0.5", "2"], "data_weights", [0.5, 2.0]),
    ({}, "", ["--gradient_checkpointing", "false"], "gradient_checkpointing", False),
    ({"offload_activations": False}, "", ["--offload_activations"], "offload_activations", True),
    ({"factor": None}, "length: 4x\n", [], "factor", 4.0),
    ({}, "train_length: 2k\n", [], "train_length", 2048),
    ({}, "", ["--factor", "2x"], "factor", 2.0),
    ({}, "", ["--short-length", "1k"], "short_length", 1024),
    # YAML reads these numbers as text.
    ({}, "learning_rate: 2e-5\n", [], "learning_rate", 2e-5),
    ({}, "adam_epsilon: 1e-6\n", [], "adam_epsilon", 1e-6),
    ({}, "data_weights: [1e-1]\n", [], "data_weights", [0.1]),
    # A list of one needs no brackets.
    *[
        ({key: "norms"}, "", [], key, ["norms"])
        for key in ("data", "short_data", "lora_targets", "lora_trains")
    ],
    ({"lora_trains": []}, "", [], "lora_trains", []),
    ({}, "save_total_limit:\n", [], "save_total_limit", None),  # no value: no limit
    ({}, "options: {beta_fast: 16.0, truncate: false}", [], "options", OPTIONS),
    ({}, "options: '{beta_fast: 16.0, truncate: false}'", [], "options", OPTIONS),
    ({}, "", ["--options", "{beta_fast: 16.0, truncate: false}"], "options", OPTIONS),
    (
        {"options": {"beta_slow": 2.0}},
        "",
        ['--options={"beta_fast": 16.0, "truncate": false}'],
        "options",
        OPTIONS,
    ),
    (SCHEDULE, "", [], "lr_scheduler_kwargs", {"min_lr_rate": 0.1}),
    (
        SCHEDULE,
        "",
        ["--lr_scheduler_kwargs", '{"min_lr_rate": 0.2}'],
        "lr_scheduler_kwargs",
        {"min_lr_rate": 0.2},
    ),
]


@pytest.mark.parametrize(("keys", "text", "words", "key", "value"), READ, ids=str)
def test_values_are_read_and_the_command_line_comes_first(recipe, keys, text, words, key, value):
    settings = read(recipe(text, **keys), *words)
    values = settings.values() | {"options": settings.method_options}
    assert values[key] == value
    if words and key != "options":
        assert settings.explicit[key] == value


@pytest.mark.parametrize(
    "words", [[], ["--plan"], ["--json"], ["--plan", "--json"], ["--max_steps", "7", "--plan"]]
)
def test_command_flags_are_returned(recipe, words):
    flags = parse_settings(["--config", recipe(), *words])[1]
    assert (flags.plan, flags.json) == tuple(f"--{name}" in words for name in ("plan", "json"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, []),
        ({"options": {"beta_fast": 16.0}, "lora_rank": 8, "lora_trains": []}, []),
        ({"tokens": 1e6, "max_steps": -1, "bf16": True}, ["--options", "{beta_slow: 2.0}"]),
        (SCHEDULE, []),
        ({"short_share": 0.25, "short_data": ["a.txt"], "data_weights": [1]}, ["--seed", "3"]),
    ],
)
def test_resolved_settings_are_a_recipe_with_the_same_settings(recipe, tmp_path, keys, words):
    settings = read(recipe(**keys), *words)
    resolved_file = tmp_path / "recipe.yaml"
    resolved_file.write_text(yaml.safe_dump(settings.resolved(), sort_keys=False))
    assert read(str(resolved_file)).resolved() == settings.resolved()
    assert read(str(resolved_file)).method_options == settings.method_options


# Refusals.


REFUSED = [
    ({"learning_rte": 1.0}, [], "'learning_rte' in .*mine.yaml .*'learning_rate'.*--keys"),
    ({}, ["--lora_rnk", "8"], "'lora_rnk' on the command line .*'lora_rank'"),
    ({}, ["--lora-rnk=8"], "'lora_rnk' on the command line"),
    ({"qwertyuiop": 1}, [], "unknown key 'qwertyuiop' in [^(]*;"),
    ({}, ["8"], "--key value, got '8'"),
    ({"max_steps": "abc"}, [], "max_steps: .*int .*'abc'"),
    ({"max_steps": 2.5}, [], "max_steps: .*int .*'2.5'"),
    ({"max_steps": [3]}, [], r"max_steps .*int, got \[3\]"),
    ({"factor": {"a": 1}}, [], "factor .*number, got {'a': 1}"),
    ({"learning_rate": None}, [], "learning_rate .*float, got None"),
    ({"data_weights": ["much"]}, [], r"data_weights .*floats, got \['much'\]"),
    ({}, ["--max_steps", "abc"], "max_steps: .*int .*'abc'"),
    ({}, ["--max_steps"], "max_steps: .*argument"),
    ({"bf16": "perhaps"}, [], "bf16"),
    ({"lr_scheduler_type": "cosin"}, [], "cosin"),
    ({"options": "beta_fast"}, [], "options .*'beta_fast'"),
    ({"options": [1]}, [], "options"),
    ({"options": 0}, [], "options must be keys and values"),
    ({"options": False}, [], "options must be keys and values"),
    ({}, ["--options", "[1, 2]"], "options"),
    ({}, ["--options", "{a: "], "options is not YAML"),
    ({"loss": "chunked"}, [], "auto, full, torch, liger, got 'chunked'"),
    ({"dtype": "float16"}, [], "float32 or bfloat16, got 'float16'"),
    ({"lora_trains": ["heads"]}, [], "embeddings and norms, got heads"),
    ({"tokens": 1e6}, [], "max_steps and tokens, got both"),
    ({"max_steps": -1}, [], "max_steps and tokens, got neither"),
    ({"max_steps": -1, "tokens": 0.0}, [], "tokens must be above 0"),
    ({"max_steps": -1, "tokens": float("inf")}, [], "tokens must be above 0"),
    ({"model": ""}, [], "'model'"),
    ({"method": ""}, [], "'method'"),
    ({"report_to": "a_tracker"}, [], "report_to: a_tracker"),
    ({"report_to": ["a_tracker"]}, [], "report_to: a_tracker"),
]
# Keys of the Trainer that do not apply, with the alternative that is named.
UNSUPPORTED = {
    "num_train_epochs": (3, "max_steps or tokens"),
    "load_best_model_at_end": (True, "retrieval_steps"),
    "resume_from_checkpoint": ("x", "resume: auto"),
    "auto_find_batch_size": (True, "--plan"),
    "eval_steps": (10, "retrieval_steps: N"),
    "push_to_hub": (True, "hf upload"),
    "remove_unused_columns": (False, "rows have no columns"),
    "logging_nan_inf_filter": (True, "stops the training"),
}
for key, (value, reason) in UNSUPPORTED.items():
    REFUSED.append(({key: value}, [], f"{key}: .*{reason}"))
    REFUSED.append(({}, [f"--{key}", str(value)], f"{key}: .*{reason}"))
REFUSED.append(({"loop": True}, [], "no key loop: .*training_loop.py"))
REFUSED.append(({}, ["--loop"], "no key loop: .*training_loop.py"))


@pytest.mark.parametrize(("keys", "words", "message"), REFUSED)
def test_bad_values_are_refused_with_a_reason(recipe, keys, words, message):
    with pytest.raises(ValueError, match=message):
        read(recipe(**keys), *words)


def test_a_missing_file_is_refused_with_the_files_beside_it(recipe, tmp_path):
    recipe()
    with pytest.raises(ValueError, match=r"yarn_64k.yaml; .* has mine.yaml"):
        read(str(tmp_path / "yarn_64k.yaml"))
    with pytest.raises(ValueError, match=r"no recipe .*nowhere/yarn.yaml$"):
        read(str(tmp_path / "nowhere" / "yarn.yaml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [demo", "is not YAML"),
        (b"model: \xff\xfe", "is not YAML"),
        (b"- model\n- demo\n", "keys and values, got list"),
        (b"just words", "keys and values, got str"),
        (b"", "keys and values, got NoneType"),
        (b"3: 1", "unknown key '3'"),
        (b"training:\n  learning_rate: 1.0e-5\n", "unknown key 'training'"),
        # Readers take these differently.
        (b"factor: 4\nfactor: 8\n", "'factor' stands twice"),
        (b"options: {beta_fast: 4, beta_fast: 8}\n", "'beta_fast' stands twice"),
        (b"train_length: 0400\n", "0400 is not one number to all readers"),
        (b"train_length: 4:16\n", "4:16 is not one number to all readers"),
        (b"train_length: -0_17\n", "-0_17 is not one number"),
        (b"data: " + b"[" * 1500, "nested too deep"),
        (b"model: 2024-99-99\n", "is not YAML"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_yaml_that_is_no_recipe_or_that_readers_take_differently_is_refused(
    tmp_path, content, message
):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


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


def package_files(folder):
    return {path.stem: path for path in (ROOT / "recipes" / folder).glob("*.yaml")}


def test_recipes_of_the_package_are_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pi_8k").mkdir()  # a folder is no recipe
    for name, path in package_files("configs").items():
        for spelling in (name, f"{name}.yaml", f"recipes/configs/{name}.yaml"):
            assert find_recipe(Path(spelling)).read_text() == path.read_text()
        assert run_in_this_process("recipes", name).stdout == path.read_text()
    assert read_recipe(Path("yarn_64k")) == yaml.safe_load(find_recipe(Path("yarn_64k")).open())
    (tmp_path / "yarn_64k.yaml").write_text("method: linear\n")
    # the user's file comes first
    assert read_recipe(Path("yarn_64k.yaml")) == {"method": "linear"}


@pytest.mark.parametrize("spelling", ["yarn_65k", "yarn_65k.yaml", "recipes/configs/yarn_65k.yaml"])
def test_an_unknown_recipe_name_is_refused_with_the_closest_one(spelling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"{spelling} \(did you mean 'yarn_64k'"):
        read_recipe(Path(spelling))


def test_recipes_and_launch_files_are_listed_with_their_descriptions():
    output = run_in_this_process("recipes").stdout
    recipes, launches = package_files("configs"), package_files("accelerate")
    for name, path in (recipes | launches).items():
        line = next(line for line in output.splitlines() if line.split()[0] == name)
        assert line.split(None, 1)[1] in " ".join(path.read_text().replace("\n# ", " ").split())
    assert not recipes.keys() & launches.keys()  # one name, one file
    assert "did you mean 'fsdp2'?" in run_in_this_process("recipes", "fsdp3").stderr


@pytest.mark.parametrize(("keys", "seed"), [({}, 42), ({"data_seed": 0}, 0), ({"seed": 0}, 0)])
def test_a_seed_of_0_is_a_seed(recipe, keys, seed):
    assert read(recipe(**keys)).row_seed == seed


@pytest.mark.parametrize(
    "key", ["factor", "length", "trained_length", "train_length", "retrieval_length"]
)
def test_a_length_of_0_is_not_taken_for_no_length(recipe, key):
    with pytest.raises(ValueError, match=f"{key} .* 1, got 0"):
        read(recipe(**{key: 0}))


def test_other_yaml_is_read_as_before(recipe):
    options = "{a: &x {b: 0, c: 10_0, d: 0x10}, e: {<<: *x, b: 0.5}, f: '0400', g: 1:2:x, h: 00:aa}"
    assert read(recipe(f"options: {options}\n")).method_options == yaml.safe_load(options)
