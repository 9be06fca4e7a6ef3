"""Questions about the standard library's code, answered again by reading the prompt's own text."""

import ast
import platform
import random
import re
import sysconfig
from pathlib import Path

import pytest
from helpers.tokenizers import KINDS, check_length, check_lm_eval, load

from rope_patch import tasks
from rope_patch.tasks import standard_library

NAMES = ["rp_code", "rp_code_next"]


def rows(name, length=3000, tokenizer="words", **kwargs):
    build = tasks.config(name)["custom_dataset"]
    return build(tokenizer=load(tokenizer), length=length, **kwargs)["test"].to_list()


def code(row):
    return re.search(r"```python\n(.*)\n```\nOne of", row["input"], re.S).group(1)


def asked(row):
    return re.search(r"contains this line:\n(.+)\nWhich", row["input"]).group(1)


def blocks(row):
    """Functions under the comments with their files: comment, lines."""
    parts = re.split(r"^(# [\w/]+\.py(?:, class \w+)?)$", code(row), flags=re.M)
    return [
        (head, body.strip("\n").split("\n"))
        for head, body in zip(parts[1::2], parts[2::2], strict=True)
    ]


def function_of(row):
    """The comment and the lines of the one function that has the line in question."""
    (block,) = (b for b in blocks(row) if asked(row) in [line.strip() for line in b[1]])
    return block


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_what_the_text_says_about_its_only_such_line(name, per_text):
    for row in rows(name, samples=9, per_text=per_text):
        assert code(row).count(asked(row)) == 1
        _, lines = function_of(row)
        tree = ast.parse("\n".join(lines))  # a whole function
        stripped = [line.strip() for line in lines]
        if name == "rp_code":
            expected = tree.body[0].name
            assert expected.strip("_") not in asked(row)
        else:
            expected = stripped[stripped.index(asked(row)) + 1]
        assert row["answers"] == [row["target"]] == [expected]
        assert row["python"] == platform.python_version()


def test_functions_are_those_of_the_library_on_this_machine():
    library = Path(sysconfig.get_path("stdlib"))
    for row in rows("rp_code", samples=2):
        for head, lines in blocks(row)[:-1]:
            source = (library / re.match(r"# ([\w/]+\.py)", head).group(1)).read_text("utf-8")
            text = [line.strip() for line in source.split("\n")]
            start = text.index(lines[0].strip())
            assert any(
                text[i : i + len(lines)] == [line.strip() for line in lines]
                for i in range(start, len(text))
            )


@pytest.mark.parametrize("name", NAMES)
def test_functions_stand_at_their_depths(name):
    for row in rows(name, 8000, depths=(0, 30, 60, 100), samples=4, per_text=4):
        listed = code(row).split("\n")
        (at,) = (i for i, line in enumerate(listed) if line.strip() == asked(row))
        assert at / len(listed) == pytest.approx(row["depth"] / 100, abs=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_the_control_asks_the_same_of_a_text_without_the_function(name):
    planted, control = (rows(name, samples=4, per_text=2, planted=p) for p in (True, False))
    for with_it, without in zip(planted, control, strict=True):
        assert (asked(without), without["target"]) == (asked(with_it), with_it["target"])
        assert asked(without) not in code(without)
        assert len(code(without)) > 2000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted", [True, False])
def test_prompts_fill_the_length_to_less_than_a_line(name, kind, planted):
    room = {"rp_code": standard_library.NAME_ROOM, "rp_code_next": standard_library.LINE_ROOM}
    for length in (1024, 3000):
        built = rows(name, length, kind, samples=2, per_text=1, planted=planted)
        check_length(built, load(kind), room[name], length, 80)


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_the_same_however_many_are_built_and_share_their_text(name):
    random.seed(8)
    state = random.getstate()
    built = rows(name, samples=5, per_text=3)
    assert random.getstate() == state
    assert rows(name, samples=3, per_text=3) == built[:3]
    assert rows(name, samples=3, per_text=3, seed=1) != built[:3]
    assert len({code(row) for row in built}) == 2
    assert len({asked(row) for row in built}) == 5


def test_chance_is_a_random_function_or_line_of_the_text():
    for row in rows("rp_code", samples=4, per_text=2):
        assert row["chance"] == row["target_chance"] == pytest.approx(1 / len(blocks(row)))
    for row in rows("rp_code_next", samples=2):
        lines = code(row).count("\n") + 1
        assert row["chance"] == row["target_chance"] == pytest.approx(1 / lines, rel=0.02)


@pytest.mark.parametrize(
    ("written", "score"),
    [
        (" read_file", 1),
        (" `read_file()`.", 1),
        ("read_file, which", 1),
        ("read_files", 0),
        ("the read_file", 0),
        ("Read_file", 0),
        ("", 0),
    ],
)
def test_the_first_word_must_be_the_name(written, score):
    doc = {"target": "read_file", "answers": ["read_file"]}
    assert standard_library.same_name(doc, [written])["score"] == score


@pytest.mark.parametrize(
    ("written", "score"),
    [
        (" x = read(y)\n    return x", 1),
        ("\n```python\n    x = read(y)\n```", 1),
        (" `x = read(y)`", 1),
        (" `x = read(y)`. It reads y.", 1),
        (" `x = read(z)`, not `x = read(y)`", 0),
        (" x = read(y)  # comment", 0),
        (" x = read(z)\n x = read(y)", 0),
        ("", 0),
    ],
)
def test_the_first_line_must_be_the_next_one(written, score):
    doc = {"target": "x = read(y)", "answers": ["x = read(y)"]}
    assert standard_library.same_line(doc, [written])["score"] == score


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    (tmp_path / "os.py").write_text("def one():\n    return 1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    for name in NAMES:
        with pytest.raises(ValueError, match=r"sources of Python's standard library, .* has 1 of"):
            rows(name, samples=1)


def test_more_questions_than_files_are_refused(monkeypatch):
    few = {f"m{i}.py": "def one():\n    return 1\n" for i in range(60)}
    monkeypatch.setattr(standard_library, "read_sources", lambda _: few)
    with pytest.raises(ValueError, match=r"0 of the standard library's files .* got per_text 2"):
        rows("rp_code", per_text=2)


def test_tests_and_installed_packages_are_no_part_of_it():
    sources = standard_library.read_sources(sysconfig.get_path("stdlib"))
    assert {"argparse.py", "json/decoder.py", "statistics.py"} <= set(sources)
    assert not [n for n in sources if "site-packages" in n or n.startswith(("test/", "config-"))]


@pytest.mark.parametrize("name", NAMES)
def test_plain_lm_eval_builds_the_same_samples(name):
    check_lm_eval([name, f"{name}_ll"], rows(name, 1500, "tiny", samples=1), 1500, samples=1)
