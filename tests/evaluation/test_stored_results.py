"""Test stored results: damaged or foreign files are measured again and reported once."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.evaluations import answer_lines, measured_numbers, request
from helpers.plugins import write_method
from helpers.tiny_models import TRAINED, make_model

import rope_patch
from rope_patch.evaluation import session
from rope_patch.evaluation.measures import perplexity
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.methods import load_plugin
from rope_patch.utils import checksums
from rope_patch.utils.checksums import unseal

TASKS = ("rp_json_kv_ll", "perplexity")


def small_request(folder):
    return request(folder, tasks=TASKS, lengths=(448,), window=16, control_context=64)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(small_request(folder))


def pieces(folder):
    """Return the paths of the pieces that hold a single number: the control's."""
    paths = sorted((folder / "cache").glob("piece-*.json"))
    return [path for path in paths if isinstance(json.loads(path.read_bytes())["value"], float)]


def stored_value(path):
    """Return what an intact piece holds beside the time that it took."""
    return {key: value for key, value in unseal(path.read_bytes()).items() if key != "seconds"}


def replace_the_number(path):
    sealed = json.loads(path.read_bytes())
    path.write_text(json.dumps(sealed | {"value": 1.0}))


def truncate_the_number(path):
    value = json.loads(path.read_bytes())["value"]
    path.write_text(path.read_text().replace(str(value), str(value)[:7]))


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    index = content.index(b".", content.index(b'"value"')) + 1
    content[index] ^= 1  # another digit
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def write_junk(path):
    path.write_bytes(b"\xff\0{")


def write_without_digest(path):
    path.write_text(f"{json.loads(path.read_bytes())['value']}\n")


def swap(path, other):
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


DAMAGES = [
    (replace_the_number, "its digest differs"),
    (truncate_the_number, "its digest differs"),
    (cut_in_half, "it is not JSON"),
    (flip_a_bit, "its digest differs"),
    (empty, "it is not JSON"),
    (write_junk, "it is not JSON"),
    (write_without_digest, "it has no digest: earlier versions wrote none"),
]


def test_damaged_results_are_measured_again_and_reported_once(finished_run, caplog):
    """Damage a piece in each way, swap two pieces, and damage an answer and the report."""
    folder, expected = finished_run
    before = {path: stored_value(path) for path in pieces(folder)}
    swapped, single = list(before)[:2], list(before)[2:]
    reasons = dict.fromkeys(swapped, "it is of another measurement: its key is")
    for path, (damage, reason) in zip(single, DAMAGES, strict=False):
        damage(path)
        reasons[path] = reason
    assert len(reasons) == 2 + len(DAMAGES)
    swap(*swapped)
    answers = folder / "cache" / "answers-0.jsonl"
    count = len(answer_lines(folder))
    first = json.loads(answers.read_text().splitlines()[0])["answer"]["log_likelihood"]
    answers.write_text(answers.read_text().replace(str(first), str(first / 2)))
    report = (folder / "report.json").read_text()
    (folder / "report.json").write_text("{")

    assert measured_numbers(evaluate(small_request(folder))) == measured_numbers(expected)
    messages = [line for line in caplog.messages if not line.startswith("caution: ")]
    lines_by_path = {line.split(": ")[0].split(" ")[0]: line for line in messages}
    assert len(lines_by_path) == len(messages) == len(reasons) + 1
    for path, reason in reasons.items():
        line = lines_by_path[str(path)]
        assert line.startswith(f"{path} is measured again: it ")
        assert reason in line
    assert (
        f"1 of {count} answers are asked again: line 1: it is damaged"
        in lines_by_path[str(answers)]
    )
    assert {path: stored_value(path) for path in before} == before
    assert len(answer_lines(folder)) == count
    new_report = json.loads((folder / "report.json").read_text())
    assert new_report["perplexity"] == json.loads(report)["perplexity"]

    caplog.clear()
    assert measured_numbers(evaluate(small_request(folder))) == measured_numbers(expected)
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
    assert "make it writable, and the same command goes on from there" in str(error.value)
    assert len(calls) == 1
    assert {path.name for path in Path(tmp_path).iterdir()} == {"cache", ".lock"}


def test_a_run_that_uses_pieces_of_an_earlier_one_says_so_and_counts_their_time(tmp_path):
    eval_request = request(tmp_path, tasks=("perplexity",), lengths=(448,), window=16)
    first = evaluate(eval_request)["run"]
    pieces = list((tmp_path / "cache").glob("piece-*"))
    for path in pieces:
        piece = json.loads(path.read_bytes())
        assert 0 < piece["seconds"] <= first["seconds"]["total"]
        del piece["digest"]
        path.write_text(json.dumps(checksums.seal({**piece, "seconds": 1000.0})))
    second = evaluate(eval_request)["run"]
    assert not first["continued"]
    assert second["continued"]
    assert second["seconds"]["perplexity"] >= 1000 * len(pieces) > 0
    assert second["seconds"]["total"] >= second["seconds"]["perplexity"]


def test_a_run_that_uses_answers_of_an_earlier_one_counts_their_time(tmp_path):
    eval_request = request(tmp_path, tasks=("rp_json_kv_ll",), lengths=(448,))
    first = evaluate(eval_request)["run"]
    answers = tmp_path / "cache" / "answers-0.jsonl"
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert 0 < sum(line["seconds"] for line in lines) <= first["seconds"]["total"]
    second = evaluate(eval_request)["run"]
    assert second["continued"]
    assert second["untimed_answers"] == 0
    # Controls are in the total alone.
    counted = sum(line["seconds"] for line in lines)
    assert second["seconds"]["total"] >= counted
    assert 0 < second["seconds"]["retrieval"] <= second["seconds"]["total"]
    for line in lines:  # as earlier versions wrote them
        del line["seconds"], line["digest"]
    sealed = [json.dumps(checksums.seal(line)) for line in lines]
    answers.write_text("\n".join(sealed) + "\n")
    third = evaluate(eval_request)["run"]
    assert third["untimed_answers"] == len(lines)


@pytest.mark.usefixtures("own_registry")
def test_answers_across_a_change_of_the_rotation_depend_on_its_numbers(tmp_path):
    """A method from outside that follows the length is keyed by its numbers, not by its name."""
    factor = "({} if seq_len is None or seq_len > geometry.trained_length else 1)"
    identities = []
    for divisor in ("4", "4", "5"):
        path = write_method(tmp_path / "mine.py", divisor=factor.format(divisor), following=True)
        load_plugin(str(path))
        model = make_model()
        handle = rope_patch.patch(model, "outside", factor=4)
        assert handle.is_length_dependent
        identities.append(session._rotation_identity(handle, TRAINED - 4, TRAINED + 4))
    first, same, other = identities
    assert first == same != other
    assert first[:2] == other[:2]
