"""Test the store of answers: exact storage, kills, damage and several processes."""

import multiprocessing
import os
import signal

import pytest

from rope_patch.inference import AnswerStore, answer_key


def lines(folder, rank=0):
    return (folder / f"answers-{rank}.jsonl").read_bytes().splitlines(keepends=True)


def test_an_answer_is_stored_and_read_back_exactly(tmp_path):
    answers = AnswerStore(tmp_path / "new")
    assert not answers.is_answered("k")
    answers.put("k", {"text": "é\n", "log_likelihood": -1 / 3})
    for store in (answers, AnswerStore(tmp_path / "new")):
        assert store.is_answered("k")
        assert store["k"] == {"text": "é\n", "log_likelihood": -1 / 3}  # bit for bit


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = AnswerStore()
    answers.put("k", {"text": "1"})
    answers.reload()
    assert answers["k"] == {"text": "1"}
    assert not list(tmp_path.iterdir())


def test_a_failure_is_stored_until_there_is_an_answer(tmp_path):
    answers = AnswerStore(tmp_path)
    answers.put("k", {"error": "no"})
    assert not answers.is_answered("k")
    assert AnswerStore(tmp_path)["k"] == {"error": "no"}
    AnswerStore(tmp_path, rank=1).put("k", {"text": "1"})
    assert AnswerStore(tmp_path)["k"] == {"text": "1"}
    answers.reload()
    assert answers.is_answered("k")


def test_an_answer_is_never_replaced_by_a_later_failure_or_answer(tmp_path):
    AnswerStore(tmp_path, rank=0).put("k", {"text": "first"})
    later = tmp_path / "later"
    for answer in ({"error": "no"}, {"text": "second"}):
        AnswerStore(later, rank=1).put("k", answer)
    (later / "answers-1.jsonl").rename(tmp_path / "answers-1.jsonl")
    assert AnswerStore(tmp_path)["k"] == {"text": "first"}


@pytest.mark.parametrize("length", [1, 2, 11, 25, 39])
def test_a_partial_line_is_no_answer_and_leaves_the_others_intact(tmp_path, caplog, length):
    """The process is killed after writing `length` bytes of the second line."""
    answers = AnswerStore(tmp_path)
    answers.put("a", {"text": "one"})
    answers.put("b", {"text": "two"})
    first, second = lines(tmp_path)
    cut = second[: min(length, len(second) - 2)]  # not even the last brace
    (tmp_path / "answers-0.jsonl").write_bytes(first + cut)
    reopened = AnswerStore(tmp_path)
    assert reopened.is_answered("a")
    assert not reopened.is_answered("b")
    reopened.put("c", {"text": "three"})
    reopened.put("b", {"text": "two"})
    last = AnswerStore(tmp_path)
    assert [last[key]["text"] for key in "abc"] == ["one", "two", "three"]
    assert (lines(tmp_path)[0], lines(tmp_path)[2]) == (first, second)  # and no partial line
    assert not caplog.messages


def test_a_complete_line_without_a_newline_is_an_answer(tmp_path):
    answers = AnswerStore(tmp_path)
    answers.put("a", {"text": "one"})
    (tmp_path / "answers-0.jsonl").write_bytes(lines(tmp_path)[0].rstrip(b"\n"))
    reopened = AnswerStore(tmp_path)
    assert reopened.is_answered("a")
    reopened.put("b", {"text": "two"})
    assert AnswerStore(tmp_path).is_answered("a")
    assert AnswerStore(tmp_path).is_answered("b")


def test_junk_in_the_file_is_dropped_with_a_warning(tmp_path, caplog):
    junk = b'[1]\n"k"\n3\nnull\n{"key": "x"}\n{"key": "y", "answer": 3}\n\xff\xfe\n\n'
    (tmp_path / "answers-0.jsonl").write_bytes(junk)
    answers = AnswerStore(tmp_path)
    answers.put("k", {"text": "1"})
    reopened = AnswerStore(tmp_path)
    assert reopened.is_answered("k")
    assert not reopened.is_answered("x")
    assert not reopened.is_answered("y")
    (line,) = caplog.messages
    assert "answers-0.jsonl: 7 of 7 answers are asked again: line 1: it has no digest" in line
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("old", "new"), [(b"0.25", b"0.75"), (b'"b"', b'"c"'), (b"0.25", b"0.2"), (b"0.25", b"0.\xb5")]
)
def test_a_damaged_answer_is_dropped_with_a_warning(tmp_path, caplog, old, new):
    answers = AnswerStore(tmp_path)
    for key, value in (("a", 0.5), ("b", 0.25)):
        answers.put(key, {"log_likelihood": value})
    path = tmp_path / "answers-0.jsonl"
    path.write_bytes(path.read_bytes().replace(old, new))
    reopened = AnswerStore(tmp_path)
    assert (len(reopened), reopened.is_answered("a")) == (1, True)
    (line,) = caplog.messages
    assert line.startswith(f"{path}: 1 of 2 answers are asked again: line 2: it is damaged")
    reopened.put("b", {"log_likelihood": 0.25})
    assert AnswerStore(tmp_path)["b"] == {"log_likelihood": 0.25}
    assert len(caplog.messages) == 1


def test_each_process_repairs_its_file_and_the_main_one_files_without_a_process(tmp_path):
    for rank in range(3):
        (tmp_path / f"answers-{rank}.jsonl").write_text("junk\n")
    AnswerStore(tmp_path, rank=1, size=2)
    sizes = [len(lines(tmp_path, rank)) for rank in range(3)]
    assert sizes == [1, 0, 1]
    AnswerStore(tmp_path, rank=0, size=2)
    assert [len(lines(tmp_path, rank)) for rank in range(3)] == [0, 0, 0]


def _write_until_killed(folder):
    answers = AnswerStore(folder)
    for i in range(10**6):
        answers.put(str(i), {"text": "x" * 200})
        if i == 20:
            os.kill(os.getpid(), signal.SIGKILL)


def test_put_writes_before_it_returns(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=_write_until_killed, args=(tmp_path,)
    )
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    answers = AnswerStore(tmp_path)
    assert all(answers.is_answered(str(i)) for i in range(21))


def test_keys_depend_on_every_part_and_not_on_the_order_of_names():
    question = ("generate", [1, 2], [3], 8, ("\n",))
    plain = {"weights": "w", "method": None}
    parts = [
        (plain, *question),
        (plain | {"weights": "v"}, *question),
        *((plain | {"method": ["yarn", {"factor": factor}]}, *question) for factor in (4.0, 2.0)),
        (plain, "generate", [1], [2, 3], 8, ("\n",)),
        (plain, "generate", [1, 2], [3], 9, ("\n",)),
        (plain, "generate", [1, 2], [3], 8, ()),
        (plain, "loglikelihood", [1, 2], [3]),
    ]
    assert len({answer_key(*part) for part in parts}) == len(parts)
    assert answer_key({"a": 1, "b": 2}) == answer_key({"b": 2, "a": 1})


def test_the_time_of_an_earlier_runs_answers_is_claimed_once(tmp_path):
    first = AnswerStore(tmp_path)
    first.put("a", {"text": "x"}, 1.5)
    first.put("b", {"text": "y"}, 2.0)
    first.put("old", {"text": "z"})  # as earlier versions wrote it
    first.put("failed", {"error": "boom"}, 9.0)
    assert first.claim_earlier_seconds(["a", "b", "old"]) == 0  # this run's own
    second = AnswerStore(tmp_path)
    second.put("new", {"text": "n"}, 4.0)
    second.reload()
    assert second.claim_earlier_seconds(["a", "a", "new", "failed"]) == 1.5
    assert second.claim_earlier_seconds(["a", "b", "old"]) == 2.0
    assert second.untimed == 1
    # All of them, whichever run gave them: what a run without a stop would have.
    assert second.claim_seconds(["a", "a", "new", "failed", "old"]) == 5.5
    assert second.claim_seconds(["a", "b"]) == 2.0
    assert second["a"] == {"text": "x"}
