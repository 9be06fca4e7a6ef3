"""What an evaluation reads back: damaged or foreign files are measured again, said once."""

import json
from pathlib import Path

import pytest
from helpers.evaluations import lines, numbers, request

from rope_patch.evaluation.measures import perplexity
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.utils.checksums import unseal

TASKS = ("rp_json_kv_ll", "perplexity")


def asked(folder):
    return request(folder, tasks=TASKS, lengths=(448,), window=16, control_context=64)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(asked(folder))


def pieces(folder):
    """The pieces that are one number: the control's."""
    found = sorted((folder / "cache").glob("piece-*.json"))
    return [path for path in found if isinstance(json.loads(path.read_bytes())["value"], float)]


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
    at = content.index(b".", content.index(b'"value"')) + 1
    content[at] ^= 1  # another digit
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def write_junk(path):
    path.write_bytes(b"\xff\0{")


def write_as_before(path):
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
    (write_as_before, "it has no digest: earlier versions wrote none"),
]


def test_what_is_damaged_is_measured_again_to_the_same_numbers_and_told_once(finished, caplog):
    """A piece for each damage, two that are swapped, an answer, and the report."""
    folder, expected = finished
    before = {path: unseal(path.read_bytes()) for path in pieces(folder)}
    swapped, single = list(before)[:2], list(before)[2:]
    reasons = dict.fromkeys(swapped, "it is of another measurement: its key is")
    for path, (damage, reason) in zip(single, DAMAGES, strict=False):
        damage(path)
        reasons[path] = reason
    assert len(reasons) == 2 + len(DAMAGES)
    swap(*swapped)
    answers = folder / "cache" / "answers-0.jsonl"
    count = len(lines(folder))
    first = json.loads(answers.read_text().splitlines()[0])["answer"]["log_likelihood"]
    answers.write_text(answers.read_text().replace(str(first), str(first / 2)))
    report = (folder / "report.json").read_text()
    (folder / "report.json").write_text("{")

    assert numbers(evaluate(asked(folder))) == numbers(expected)
    messages = [line for line in caplog.messages if not line.startswith("caution: ")]
    told = {line.split(": ")[0].split(" ")[0]: line for line in messages}
    assert len(told) == len(messages) == len(reasons) + 1
    for path, reason in reasons.items():
        line = told[str(path)]
        assert line.startswith(f"{path} is measured again: it ")
        assert reason in line
    assert f"1 of {count} answers are asked again: line 1: it is damaged" in told[str(answers)]
    assert {path: unseal(path.read_bytes()) for path in before} == before
    assert len(lines(folder)) == count
    again = json.loads((folder / "report.json").read_text())
    assert again["perplexity"] == json.loads(report)["perplexity"]

    caplog.clear()
    assert numbers(evaluate(asked(folder))) == numbers(expected)
    assert all(line.startswith("caution: ") for line in caplog.messages)


def test_a_full_disk_stops_the_run_at_once(tmp_path, monkeypatch):
    """Nothing else is measured: it could not be kept."""
    original, calls = perplexity.control_loss, []

    def full(*given):
        calls.append(given)
        (tmp_path / "cache").write_text("a file where the folder was")
        return original(*given)

    monkeypatch.setattr(perplexity, "control_loss", full)
    with pytest.raises(OSError, match=r"piece-\w+\.json could not be written to .*cache") as error:
        evaluate(asked(tmp_path))
    assert "make it writable, and the same command goes on from there" in str(error.value)
    assert len(calls) == 1
    assert {path.name for path in Path(tmp_path).iterdir()} == {"cache", ".lock"}
