"""Test atomic writes on full and read-only disks, and outputs that cannot be written."""

import errno
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from helpers.commands import run_in_this_process
from helpers.small_disk import disk as disk
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.inference import AnswerStore
from rope_patch.runs import RunFolder
from rope_patch.searching import SearchJournal
from rope_patch.utils import (
    NotWritten,
    add_write_advice,
    atomic_write,
    explain_write_errors,
    require_writable_file,
    require_writable_folder,
)

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
MISSING_MODEL = "/no/such/model"  # an error about it shows that the model was looked up


def test_a_full_disk_is_an_error_and_leaves_the_old_file(disk):
    path = disk(0.1) / "results.json"
    atomic_write(path, "before")
    with pytest.raises(NotWritten) as error, add_write_advice("All is kept: REMEDY, and try again"):
        atomic_write(path, b"x" * 200_000)
    assert str(error.value) == (
        f"results.json could not be written to {path.parent}, where 0.1 MB are free (No space left "
        "on device). All is kept: make room, and try again"
    )
    assert path.read_text() == "before"
    assert [each.name for each in path.parent.iterdir()] == ["results.json"]


def test_a_read_only_disk_is_an_error_with_advice(disk):
    folder = disk(1)
    disk(1, read_only=True)
    refusal = pytest.raises(NotWritten, match=r"\(Read-only file system\)\. Now make it writable$")
    with refusal, add_write_advice("Now REMEDY"):
        atomic_write(folder / "x" / "y.json", "text")
    with pytest.raises(NotWritten, match=f"the report could not be written to {folder}/new"):
        require_writable_folder(folder / "new", "the report")
    with pytest.raises(NotWritten, match=f"x.svg could not be written to {folder} "):
        require_writable_file(folder / "x.svg", "the picture", folder_exists=True)


def test_the_check_refuses_a_disk_without_room_for_a_small_file(disk):
    folder = disk(0.1)
    with pytest.raises(OSError, match="No space"):
        (folder / "full").write_bytes(b"x" * 200_000)
    with pytest.raises(NotWritten, match=r"where 0\.0 MB are free"):
        require_writable_folder(folder / "new", "the report")


def test_errors_of_libraries_on_a_full_disk_are_explained(tmp_path):
    for words in ("SafetensorError: I/O error: No space", "PyTorchStreamWriter failed"):
        refusal = pytest.raises(
            NotWritten, match=r"the model could not be written to .* MB are free"
        )
        with refusal, explain_write_errors(tmp_path, "the model"):
            raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="boom"), explain_write_errors(tmp_path, "the model"):
        raise RuntimeError("boom")


def test_errors_unrelated_to_the_disk_pass_unchanged(tmp_path, monkeypatch):
    for error in (OSError("config.json is not a valid JSON file"), KeyError("I"), ValueError("no")):
        with (
            pytest.raises(type(error)) as error_info,
            explain_write_errors(tmp_path, "the model", "REMEDY"),
        ):
            raise error
        assert error_info.value is error

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    locking = pytest.raises(OSError, match="cannot be locked")
    writing = explain_write_errors(tmp_path, "the search")
    with locking as error_info, writing, RunFolder(tmp_path).locked():
        pass
    assert not isinstance(error_info.value, NotWritten)


def test_the_outermost_context_sets_the_name_and_the_advice():
    inner = explain_write_errors("x", "the model", "Most is kept: REMEDY")
    with (
        pytest.raises(NotWritten) as error,
        add_write_advice("Now REMEDY"),
        inner,
        explain_write_errors("x", "y", "No"),
    ):
        raise OSError(errno.EACCES, "Permission denied")
    assert str(error.value) == (
        "the model could not be written to x (Permission denied). Now make it writable"
    )
    with (
        pytest.raises(NotWritten) as error,
        explain_write_errors("x", "the model"),
        explain_write_errors("x", "y", "REMEDY"),
    ):
        raise OSError(errno.EACCES, "Permission denied")
    assert str(error.value).endswith(
        "the model could not be written to x (Permission denied). make it writable"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fdopen", "pathlib.Path.replace"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, number, step):
    path = tmp_path / "results.json"
    atomic_write(path, "before")

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(step, refuse)
    with pytest.raises(NotWritten) as error, add_write_advice("All is kept: REMEDY, and try again"):
        atomic_write(path, "after")
    monkeypatch.undo()
    is_full = number == errno.ENOSPC
    words = r", where [\d,.]+ MB are free" if is_full else ""
    remedy = "make room" if is_full else "make it writable"
    message = (
        rf"results\.json could not be written to {re.escape(str(tmp_path))}{words} "
        rf"\({os.strerror(number)}\)\. All is kept: {remedy}, and try again"
    )
    assert re.fullmatch(message, str(error.value))
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "before"
    # Other processes get the error by pickle, without its cause.
    with (
        pytest.raises(NotWritten) as outer_error,
        explain_write_errors(tmp_path, "the model", "Now REMEDY"),
    ):
        raise pickle.loads(pickle.dumps(error.value))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert str(outer_error.value).startswith("the model could not be written to ")
    assert str(outer_error.value).endswith(f" ({os.strerror(number)}). Now {remedy}")


def test_checks_leave_nothing_behind(tmp_path):
    require_writable_folder(tmp_path / "a" / "b", "the report")
    require_writable_file(tmp_path / "a" / "b.svg", "the picture", folder_exists=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"there is no folder .*a for b.svg: make it first"):
        require_writable_file(tmp_path / "a" / "b.svg", "the picture", folder_exists=True)
    with pytest.raises(ValueError, match="is a folder: expected a file for the picture"):
        require_writable_file(tmp_path, "the picture", folder_exists=True)


IS_A_FILE = "is a file: expected a folder for"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval {model} --method none --out file", IS_A_FILE),
        ("eval {model} --method none --out file/in", f"file {IS_A_FILE}"),
        ("search {model} --length 512 --out file/in", f"file {IS_A_FILE}"),
        ("search {model} --length 512 --picture file/x.svg", "file is a file"),
        ("recommend {model} --length 512 --minutes 1 --out file", IS_A_FILE),
        ("bench {model} --method yarn --out file/x.json", "folder of file/x.json"),
        ("bench --out file", IS_A_FILE),
        ("diagnose {model} --picture no/dir/x.svg", "no folder no/dir for x.svg"),
        ("diagnose {model} --picture file/x.svg", "file is a file"),
        ("export {model} --engine llama.cpp --method yarn --write file/in", f"file {IS_A_FILE}"),
        (
            "finetune --model {model} --method yarn --factor 2 --data novels --train_length 64 "
            "--max_steps 1 --output_dir file",
            f"file {IS_A_FILE}",
        ),
    ],
)
def test_unwritable_outputs_are_refused_before_the_model_is_looked_up(
    tmp_path, monkeypatch, command, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    words = command.format(model=MISSING_MODEL).split()
    status, out, err = run_in_this_process(*words)
    with_verdict = words[0] in ("bench", "eval")  # where 1 is an answer
    assert (status, out) == (2 if with_verdict else 1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "precious"


def test_a_picture_in_a_missing_folder_is_refused(tmp_path):
    diagnosis = rope_patch.diagnose(TINY)
    with pytest.raises(ValueError, match="there is no folder"):
        diagnosis.plot(tmp_path / "no" / "x.svg")
    assert not list(tmp_path.iterdir())


def test_the_same_command_finishes_a_report_once_the_disk_has_room(disk):
    folder = disk(0.1)
    command = ["eval", TINY, "--method", "none", "--lengths", "288", "--tasks", "perplexity"]
    command += ["--control-context", "256", "--window", "32", "--out", folder]
    status, out, err = run_in_this_process(*command)
    assert (status, out) == (2, "")
    line = err.splitlines()[-1]
    assert f" could not be written to {folder}" in line
    assert "MB are free (No space left on device). What was measured is kept in" in line
    assert line.endswith(f"{folder}/cache: make room, and the same command goes on from there")
    assert [path.name for path in folder.rglob(".*")] == [".lock"]
    pieces = {path: path.read_bytes() for path in (folder / "cache").iterdir()}
    assert pieces
    disk(20)
    status, out, _ = run_in_this_process(*command)
    assert (status, out.splitlines()[-1]) == (0, f"{folder}/report.html")
    assert {path: path.read_bytes() for path in pieces} == pieces
    assert json.loads((folder / "report.json").read_text())["run"]["not_run"] == []


@pytest.mark.parametrize("store_type", ["answers", "state"])
def test_answers_and_journals_continue_after_a_full_disk(disk, store_type):
    folder = disk(0.1)
    reopen = {
        "answers": lambda: AnswerStore(folder),
        "state": lambda: SearchJournal(folder, {"seed": 1}),
    }[store_type]
    name = {"answers": "answers-0.jsonl", "state": "state.jsonl"}[store_type]
    store, count = reopen(), 0
    message = ""
    while not message:
        try:
            store.put(str(count), {"text": "x" * 5000})
            count += 1
        except NotWritten as error:
            message = str(error)
    assert message.startswith(f"{name} could not be written to {folder}, where")
    if store_type == "state":
        store.close()
    assert count > 5
    disk(5)
    reopened = reopen()
    assert len(reopened) == count
    reopened.put(str(count), {"text": "y"})
    if store_type == "state":
        reopened.close()
    assert len(reopen()) == count + 1


def test_a_save_on_a_full_disk_leaves_the_old_model(disk):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    folder = disk(5) / "model"
    rope_patch.save(model, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = sum(map(len, before.values()))
    disk(1.3 * size / 2**20)  # less than two copies of the model
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(
        NotWritten, match=rf"model could not be written to {folder.parent}"
    ) as error:
        rope_patch.save(model, folder)
    assert "What was in the folder before is still there: make room" in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
