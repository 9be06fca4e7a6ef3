"""Test names in Markdown and on terminals."""

import pytest
from helpers.commands import run_in_this_process

from rope_patch.cli.runtime import show
from rope_patch.evaluation.report.table import Cell, Row, Table
from rope_patch.extending.card import render_card
from rope_patch.recommending.result import Recommendation
from rope_patch.recommending.summary import as_markdown
from rope_patch.utils.escaping import (
    escape_markdown,
    markdown_block,
    markdown_code,
    markdown_prose,
    printable,
)


@pytest.mark.parametrize(
    ("name", "escaped", "code"),
    [
        ("<img src=x>", "&lt;img src=x&gt;", "`<img src=x>`"),
        ("[a](b)", r"\[a\](b)", "`[a](b)`"),
        ("a | b & c", r"a \| b &amp; c", "`a | b & c`"),
        ("**b** _i_", r"\*\*b\*\* \_i\_", "`**b** _i_`"),
        ("# x", r"\# x", "`# x`"),
        ("two\nlines\x1b[31m", r"two lines \[31m", "`two lines [31m`"),
        ("``` x", r"\`\`\` x", "```` ``` x ````"),
        ("my-model.1", "my-model.1", "`my-model.1`"),
    ],
)
def test_markdown_shows_the_name_and_nothing_else(name, escaped, code):
    assert escape_markdown(name) == escaped
    assert markdown_code(name) == code


def test_a_terminal_gets_no_control_characters():
    assert printable("\x1b]0;owned\x07a\tb\nc\u202e\x9b") == " ]0;owned a\tb\nc  "


@pytest.mark.parametrize(
    ("sentence", "written"),
    [
        ("see `a_b | c` and a_b", r"see `a_b | c` and a\_b"),
        ("one ` alone", r"one \` alone"),
        ("<b>`<i>`</b>", "&lt;b&gt;`<i>`&lt;/b&gt;"),
        ("two\nlines", "two lines"),
    ],
)
def test_a_sentence_keeps_its_code_and_nothing_else(sentence, written):
    assert markdown_prose(sentence) == written


def test_a_block_of_code_cannot_be_left():
    assert markdown_block("a\n```\n# b\x1b", "sh") == "````sh\na\n```\n# b \n````"


NASTY = "<img src=x onerror=alert(1)> **b** [c](d)\n# e \x1b[31m"
SHOWN = r"&lt;img src=x onerror=alert(1)&gt; \*\*b\*\* \[c\](d) \# e \[31m"


def recommendation():
    row = {
        "name": NASTY,
        "method": "yarn",
        "options": {},
        "status": NASTY,
        "engines": [],
        "everywhere": False,
        "long": None,
        "short": None,
        "prose": None,
        "behind": None,
        "price": None,
        "prose_price": None,
        "leaves_short": False,
    }
    return Recommendation(
        model=NASTY,
        weights="w",
        length=4096,
        trained_length=1024,
        short_length=512,
        budget=1.0,
        seconds=1.0,
        method=None,
        outcome="nothing holds",
        verdict=NASTY,
        reasons=(NASTY,),
        python="patch('```')",
        shell="",
        rows=[row],
        samples=6,
        scored=6,
        not_measured=(NASTY,),
        command="rope-patch recommend '`'",
    )


def card(tmp_path):
    table = Table(
        name="t",
        corner="method",
        columns=[Cell(text=NASTY)],
        rows=[Row(name=NASTY, cells=[Cell(text="1")])],
        groups=[],
    )
    facts = {
        "model": NASTY,
        "method": NASTY,
        "trained_length": 1024,
        "length": 4096,
        "sentences": [NASTY],
        "table": table,
        "lines": [NASTY],
        "left_out": [NASTY],
        "training": None,
        "samples": (12, 6),
        "command": NASTY,
    }
    return render_card(tmp_path, facts)


def test_recommendations_and_cards_show_the_words_of_others(tmp_path):
    header = ("Made by", "tags:", "base_model:")  # code, and strings of YAML
    for page, count in ((as_markdown(recommendation()), 6), (card(tmp_path), 8)):
        prose = [line for line in page.splitlines() if not line.startswith(header)]
        assert sum(line.count(SHOWN) for line in prose) == count, page
        assert not any("<img" in line or "\x1b" in line for line in prose)
        assert not any(line.startswith("# e") for line in page.splitlines())
    assert "\n````\npatch('```')\n````\n" in as_markdown(recommendation())


def test_commands_print_no_control_characters(capsys):
    show(f"{NASTY}\nnext")
    assert capsys.readouterr().out == NASTY.replace("\x1b", " ") + "\nnext\n"


@pytest.mark.parametrize("command", ["report", "diagnose"])  # with a verdict, and without
def test_errors_print_no_control_characters(command, tmp_path):
    result = run_in_this_process(command, tmp_path / "\x1b[31mmissing")
    assert result.returncode in (1, 2)
    assert "[31mmissing" in result.stderr
    assert "\x1b" not in result.stderr
