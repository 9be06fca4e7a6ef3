"""Test stored results: what they depend on, and damaged, foreign and partial files."""

import json
import shutil

import pytest
import torch
from helpers.evaluations import answer_lines, measured_numbers, request, run_until_killed
from helpers.method_names import frequency_methods, position_maps
from helpers.plugins import write_method
from helpers.tiny_models import TRAINED, forward, make_config, make_model, tokens

import rope_patch
from rope_patch.evaluation import evaluate, find_other_config, rotation_identity
from rope_patch.evaluation.measures import perplexity
from rope_patch.methods import load_plugin
from rope_patch.utils import config_fingerprint, fingerprint, seal, unseal

pytestmark = pytest.mark.usefixtures("never_drawn")

TASKS = ("rp_json_kv_ll", "perplexity")


def small_request(folder):
    return request(folder, tasks=TASKS, lengths=(448,), window=16, control_context=64)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(small_request(folder))


@pytest.fixture
def copied(finished_run, tmp_path):
    """Return a copy of the finished run's folder."""
    return shutil.copytree(finished_run[0], tmp_path / "out")


# -- damaged files ---------------------------------------------------------------------------------


def pieces(folder):
    """Return the paths of the pieces that hold a single number: the control's."""
    paths = sorted((folder / "cache").glob("piece-*.json"))
    return [path for path in paths if isinstance(json.loads(path.read_bytes())["value"], float)]


def stored_value(path):
    """Return what an intact piece holds beside the time that it took."""
    return {key: value for key, value in unseal(path.read_bytes()).items() if key != "seconds"}


def flip_a_bit(content):
    changed = bytearray(content)
    changed[content.index(b".", content.index(b'"value"')) + 1] ^= 1  # another digit
    return bytes(changed)


def other_number(content):
    return json.dumps(json.loads(content) | {"value": 1.0}).encode()


DAMAGES = {
    "another number": (other_number, "digest differs"),
    "cut in half": (lambda content: content[: len(content) // 2], "not JSON"),
    "a bit": (flip_a_bit, "digest differs"),
    "empty": (lambda _: b"", "not JSON"),
    "junk": (lambda _: b"\xff\0{", "not JSON"),
    "no digest": (lambda content: f"{json.loads(content)['value']}\n".encode(), "no digest"),
}


def test_damaged_results_are_measured_again_and_reported_once(finished_run, copied, caplog):
    """Damage a piece in each way, swap two pieces, and damage an answer and the report."""
    _, expected = finished_run
    before = {path: stored_value(path) for path in pieces(copied)}
    (first, second), single = list(before)[:2], list(before)[2:]
    reasons = dict.fromkeys((first, second), "of another measurement")
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    for path, (damage, reason) in zip(single, DAMAGES.values(), strict=False):
        path.write_bytes(damage(path.read_bytes()))
        reasons[path] = reason
    assert len(reasons) == 2 + len(DAMAGES)
    answers = copied / "cache" / "answers-0.jsonl"
    count = len(answer_lines(copied))
    likelihood = json.loads(answers.read_text().splitlines()[0])["answer"]["log_likelihood"]
    answers.write_text(answers.read_text().replace(str(likelihood), str(likelihood / 2)))
    report = json.loads((copied / "report.json").read_text())
    (copied / "report.json").write_text("{")

    assert measured_numbers(evaluate(small_request(copied))) == measured_numbers(expected)
    messages = [line for line in caplog.messages if not line.startswith("caution: ")]
    lines_by_path = {line.split(": ")[0].split(" ")[0]: line for line in messages}
    assert len(lines_by_path) == len(messages) == len(reasons) + 1
    for path, reason in reasons.items():
        assert reason in lines_by_path[str(path)]
    assert f"1 of {count} answers are asked again" in lines_by_path[str(answers)]
    assert {path: stored_value(path) for path in before} == before
    assert len(answer_lines(copied)) == count
    again = json.loads((copied / "report.json").read_text())
    assert again["perplexity"] == report["perplexity"]

    caplog.clear()
    assert measured_numbers(evaluate(small_request(copied))) == measured_numbers(expected)
    assert all(line.startswith("caution: ") for line in caplog.messages)


def test_a_full_disk_stops_the_run_at_once(tmp_path, monkeypatch):
    """Measuring more is useless if it cannot be stored."""
    original, calls = perplexity.control_loss, []

    def fill_disk(*args):
        calls.append(args)
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("a file where the folder was")
        return original(*args)

    monkeypatch.setattr(perplexity, "control_loss", fill_disk)
    with pytest.raises(OSError, match=r"piece-\w+\.json could not be written to .*cache") as error:
        evaluate(small_request(tmp_path))
    assert "the same command goes on" in str(error.value)
    assert len(calls) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"cache", ".lock"}


# -- runs that were cut short ----------------------------------------------------------------------


# Two answers under each of two methods; pieces come before answers.
@pytest.mark.parametrize(
    "kill_point", [{"answers": 3}, pytest.param({"pieces": 7}, marks=pytest.mark.slow)], ids=str
)
def test_a_killed_run_resumes_to_the_same_numbers(finished_run, tmp_path, kill_point):
    _, expected = finished_run
    run_until_killed(small_request(tmp_path), **kill_point)
    if answered := kill_point.get("answers"):  # killed while the last line was written
        path = tmp_path / "cache" / "answers-0.jsonl"
        path.write_bytes(path.read_bytes()[:-25])
        assert len(answer_lines(tmp_path)) == answered - 1
    before = answer_lines(tmp_path)
    assert measured_numbers(evaluate(small_request(tmp_path))) == measured_numbers(expected)
    keys = [key for key, _ in answer_lines(tmp_path)]
    assert keys[: len(before)] == [key for key, _ in before]
    assert len(keys) == len(set(keys))  # nothing that was finished was answered again
    assert len(before) < len(keys)
    assert not list(tmp_path.rglob(".*-*"))  # no partial files


def test_a_run_that_uses_pieces_of_an_earlier_one_says_so_and_counts_their_time(
    finished_run, copied
):
    first = finished_run[1]["run"]
    stored = list((copied / "cache").glob("piece-*"))
    for path in stored:
        piece = json.loads(path.read_bytes())
        assert 0 < piece["seconds"] <= first["seconds"]["total"]
        del piece["digest"]
        path.write_text(json.dumps(seal({**piece, "seconds": 1000.0})))
    (copied / "cache" / "answers-0.jsonl").unlink()  # pieces alone
    second = evaluate(small_request(copied))["run"]
    assert not first["continued"]
    assert second["continued"]
    assert second["seconds"]["perplexity"] >= 1000 * len(stored) > 0
    assert second["seconds"]["total"] >= second["seconds"]["perplexity"]


def test_a_run_that_uses_answers_of_an_earlier_one_counts_their_time(finished_run, copied):
    first = finished_run[1]["run"]
    answers = copied / "cache" / "answers-0.jsonl"
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    counted = sum(line["seconds"] for line in lines)
    assert 0 < counted <= first["seconds"]["total"]
    second = evaluate(small_request(copied))["run"]
    assert second["untimed_answers"] == 0
    assert second["seconds"]["total"] >= counted  # controls are in the total alone
    assert 0 < second["seconds"]["retrieval"] <= second["seconds"]["total"]
    for line in lines:  # as earlier versions wrote them
        del line["seconds"], line["digest"]
    sealed = [json.dumps(seal(line)) for line in lines]
    answers.write_text("\n".join(sealed) + "\n")
    assert evaluate(small_request(copied))["run"]["untimed_answers"] == len(lines)


# -- what answers depend on besides their prompts --------------------------------------------------


def identity(method, length=2 * TRAINED, end=2 * TRAINED, **options):
    return rotation_identity(rope_patch.patch(make_model(), method, **options), length, end)


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_temperatures_have_answers_of_their_own(method):
    options = {"factor": 4} if method == "yarn" else {}
    identities = [
        identity(method, temperature=temperature, **options)
        for temperature in (None, "log-n", "llama4", 2)
    ]
    assert all(identities.count(each) == 1 for each in identities)


def test_position_maps_have_answers_of_their_own():
    requests = [(name, {"groups": (2, 4)} if name == "dpe" else {}) for name in position_maps()]
    requests += [
        ("rerope", {"window": 8}),
        ("rerope", {"temperature": "none"}),
        ("rerope", {"on": "yarn:1.5"}),
        ("self-extend", {"window": TRAINED // 4, "group": 4}),
    ]
    identities = [identity(name, **options) for name, options in requests]
    assert None not in identities
    assert all(identities.count(each) == 1 for each in identities)


@pytest.mark.parametrize(
    ("method", "options", "length", "end", "is_shared"),
    [
        ("dynamic-yarn", {}, TRAINED // 2, TRAINED, True),
        ("default", {"factor": 1, "temperature": 2}, 2 * TRAINED, 2 * TRAINED, False),
        *(
            ("default", {"factor": 1, "temperature": temperature}, 2 * TRAINED, end, is_shared)
            for temperature in ("log-n", "llama4", "drope:0.1")
            for end, is_shared in ((TRAINED, True), (TRAINED + 1, False))
        ),
        *(
            (name, {}, TRAINED, end, is_shared)
            for name in ("rerope", "self-extend", "jet-long")
            for end, is_shared in ((TRAINED, True), (TRAINED + 1, False))
        ),
        ("string", {}, TRAINED, TRAINED, False),
    ],
)
def test_what_rotates_as_the_plain_model_shares_its_answers(
    method, options, length, end, is_shared
):
    assert (identity(method, length=length, end=end, **options) is None) == is_shared


@pytest.mark.parametrize("method", ["dynamic-yarn", "self-extend"])
def test_only_equal_bits_share_the_plain_models_answer(method):
    short = {"length": TRAINED // 2, "end": TRAINED}
    assert identity(method, **short) is None
    assert identity(method, **short, kernels="hf") is None
    assert identity(method, **short, kernels="reference") == {"kernels": "reference"}


def test_the_same_weights_under_another_config_have_answers_of_their_own(tmp_path):
    """An edited theta is in no weight: the plain model of before answered for that of now."""
    model = make_model()
    weights, config = fingerprint(model), config_fingerprint(model.config)
    model.config.rope_parameters["rope_theta"] *= 100
    edited = config_fingerprint(model.config)
    model.config._name_or_path = "elsewhere"
    assert config_fingerprint(model.config) == edited != config
    assert fingerprint(model) == weights
    found = [find_other_config(tmp_path, weights, each) for each in (config, edited) * 2]
    assert found == [None, edited, None, edited]  # the first keeps the keys of earlier releases
    assert find_other_config(tmp_path, "other weights", edited) is None


def test_a_config_that_was_not_noted_is_no_guess(tmp_path, caplog):
    """An earlier release noted none, which is said; a damaged note gives answers of their own."""
    (tmp_path / "answers-0.jsonl").touch()
    assert find_other_config(tmp_path, "weights", "config") is None
    assert "did not note the config" in caplog.text
    note = tmp_path / "configs.jsonl"
    note.write_bytes(note.read_bytes().replace(b"config", b"confiq"))
    assert find_other_config(tmp_path, "weights", "config") == "config"
    assert "damaged" in caplog.text


def test_what_a_dynamic_method_starts_from_has_answers_of_its_own():
    """Beyond the trained length both follow the text, one from the config's own scaling on."""
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    found = []
    for start in ("running", "unscaled"):
        model = make_model(rope_parameters=scaling)
        handle = rope_patch.patch(model, "dynamic-yarn", trained_length=TRAINED, start=start)
        found.append(rotation_identity(handle, TRAINED, 2 * TRAINED))
    assert found[0] != found[1]


def test_a_dynamic_method_on_some_layers_has_answers_of_its_own():
    """Beyond the trained length, layers with a window rotate as before unless they are named."""
    found = []
    for layer_types in (None, ["full_attention"], ["full_attention", "sliding_attention"]):
        handle = rope_patch.patch(make_model("gemma3"), "dynamic-yarn", layer_types=layer_types)
        found.append(rotation_identity(handle, TRAINED, 2 * TRAINED))
    assert found[0] == found[1] != found[2]
    assert len(identity("dynamic-yarn", length=TRAINED)) == 2  # as earlier releases stored it


@pytest.mark.usefixtures("own_registry")
def test_answers_across_a_change_of_the_rotation_depend_on_its_numbers(tmp_path):
    """A method from outside that follows the length is keyed by its numbers, not by its name."""
    factor = "({} if seq_len is None or seq_len > geometry.trained_length else 1)"
    identities = []
    for divisor in ("4", "4", "5"):
        path = write_method(tmp_path / "mine.py", divisor=factor.format(divisor), following=True)
        load_plugin(str(path))
        identities.append(identity("outside", TRAINED - 4, TRAINED + 4, factor=4))
    first, same, other = identities
    assert first == same != other
    assert first[:2] == other[:2]


# Of each family one that equals another at some length, and the kernels that round otherwise.
FACTORS = {"yarn": 2, "linear": 2, "ntk": 2, "ntk-by-parts": 2}
KERNELS = ("yarn", "dynamic-yarn", "self-extend")


def make_in(dtype):
    """Return a model that is made in a dtype, as loaded in it: its frequencies are in float32."""
    torch.manual_seed(0)
    return type(make_model())._from_config(make_config("llama"), dtype=dtype).eval()


def requests():
    """Yield every method that a Llama takes without options, and some by other kernels."""
    for name in [*frequency_methods(), *position_maps()]:
        model = make_model()
        for given in ({}, {"factor": FACTORS.get(name, 4)}):
            try:
                rope_patch.patch(model, name, **given).undo()
            except (ValueError, TypeError):  # it needs options, or takes no factor
                continue
            yield name, given
            if name in KERNELS:
                yield from ((name, {**given, "kernels": each}) for each in ("hf", "reference"))
            break


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        (TRAINED, torch.float32),
        (2 * TRAINED, torch.bfloat16),
        pytest.param(TRAINED, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(2 * TRAINED, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_methods_that_share_an_answer_give_the_same_bits(length, dtype):
    """Answers are shared by their key alone, so equal keys must mean equal logits."""
    by_key = {"null": [("plain", forward(make_in(dtype), tokens(length)))]}
    for name, given in requests():
        model = make_in(dtype)
        handle = rope_patch.patch(model, name, **given)
        key = json.dumps(rotation_identity(handle, length, length), sort_keys=True)
        by_key.setdefault(key, []).append((f"{name} {given}", forward(model, tokens(length))))
    for (first, expected), *others in by_key.values():
        for name, got in others:
            assert got.equal(expected), f"{name} shares the answers of {first}"
    shared = [sorted(name.split()[0] for name, _ in each) for each in by_key.values()]
    assert len(by_key) > 5
    if length == TRAINED:
        assert {"plain", "dynamic-yarn", "rerope"} <= set(max(shared, key=len))
    else:
        assert ["dynamic-yarn", "yarn"] in shared
