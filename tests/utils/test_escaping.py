"""Test names and errors in Markdown, on terminals and in notebooks."""

import pickle
from html.parser import HTMLParser

import pytest
from helpers.commands import run_in_this_process
from helpers.tiny_models import make_model
from helpers.tokenizers import TINY
from huggingface_hub import EvalResult, ModelCard
from matplotlib.figure import Figure

import rope_patch
from rope_patch.evaluation import Cell, Row, Table
from rope_patch.extending import render_card
from rope_patch.recommending import Recommendation, recommendation_markdown
from rope_patch.tasks import TooShort
from rope_patch.utils import (
    NotWritten,
    describe_error,
    did_you_mean,
    escape_markdown,
    markdown_block,
    markdown_code,
    markdown_prose,
    one_line,
    printable,
    text_html,
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
        "usable": "4,096 tokens",
        "evaluations": [
            EvalResult("text-generation", "rope_patch", NASTY, "accuracy", 0.5, metric_name=NASTY)
        ],
        "table": table,
        "lines": [NASTY],
        "left_out": [NASTY],
        "training": None,
        "samples": (12, 6),
        "command": NASTY,
    }
    return render_card(tmp_path, facts)


def test_recommendations_and_cards_show_the_words_of_others(tmp_path):
    header = ModelCard(card(tmp_path), ignore_metadata_errors=False).data
    assert (header.base_model, header.tags[-1]) == (NASTY, NASTY)
    assert [(each.dataset_name, each.metric_name) for each in header.eval_results] == [
        (NASTY, NASTY)
    ]
    for page, count in ((recommendation_markdown(recommendation()), 6), (card(tmp_path), 8)):
        text = ModelCard(page).text  # without YAML
        prose = [line for line in text.splitlines() if not line.startswith("Made by")]  # code
        assert sum(line.count(SHOWN) for line in prose) == count, page
        assert not any("<img" in line or "\x1b" in line for line in prose)
        assert not any(line.startswith("# e") for line in page.splitlines())
    assert "\n````\npatch('```')\n````\n" in recommendation_markdown(recommendation())


def test_commands_print_no_control_characters(tmp_path):
    folder = tmp_path / "\x1b[31mred"
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    result = run_in_this_process("diagnose", folder, "--method", "yarn", "--factor", "4")
    assert result.returncode == 0, result.stderr
    assert "[31mred" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", ["report", "diagnose"])  # with a verdict, and without
def test_errors_print_no_control_characters(command, tmp_path):
    result = run_in_this_process(command, tmp_path / "\x1b[31mmissing")
    assert result.returncode in (1, 2)
    assert "[31mmissing" in result.stderr
    assert "\x1b" not in result.stderr


# --- Errors ---------------------------------------------------------------------------------------


def test_a_long_text_is_cut_at_a_word_if_it_has_words():
    assert one_line("one two three four", 14) == "one two ..."
    assert one_line("one\ntwo\t\x1b[31mthree") == "one two [31mthree"
    assert one_line("x" * 500, None) == "x" * 500
    for text in ("/a/path/" + "x" * 500, repr(10**400), "長い文章" * 100):
        line = one_line(text, 60)
        assert len(line) == 60
        assert line == text[:56] + " ..."


def test_an_error_without_a_message_is_described_by_its_class():
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(ValueError("a\nb")) == "ValueError: a b"


@pytest.mark.parametrize(
    "error", [TooShort(100, "rp_vt", 300), NotWritten("x was not written", "make room", "REMEDY")]
)
def test_errors_survive_pickling(error):
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert str(unpickled) == str(error)


def test_the_closest_name_is_suggested_if_it_is_close_enough():
    assert did_you_mean("yran", {"yarn": 1, "ntk": 2}) == " (did you mean 'yarn'?)"
    assert did_you_mean("yran", ["yarn"], cutoff=0.8) == ""
    assert did_you_mean(7, ["yarn"]) == ""


# --- Notebooks ------------------------------------------------------------------------------------


class TextOf(HTMLParser):
    """The text of a fragment, and its tags."""

    def __init__(self, html):
        super().__init__()
        self.text, self.tags = "", []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("text", ["one line", "a title\nfirst  column\n  <b>&amp;</b>", ""])
def test_the_text_is_kept_and_escaped(text):
    parsed = TextOf(text_html(text))
    assert parsed.text == text.replace("\n", "", 1)  # the title ends a block
    assert set(parsed.tags) <= {"div", "strong", "pre"}


def test_a_handle_shows_its_summary_until_it_is_undone():
    handle = rope_patch.patch(make_model(), "yarn", factor=4)
    assert TextOf(handle._repr_html_()).text == handle.summary().replace("\n", "", 1)
    handle.undo()
    assert "(undone)" in TextOf(handle._repr_html_()).text


def test_a_diagnosis_shows_its_text_and_returns_a_figure():
    diagnosis = rope_patch.diagnose(make_model(), "yarn", factor=4)
    assert TextOf(diagnosis._repr_html_()).text == str(diagnosis).replace("\n", "", 1)
    figure = diagnosis.figure()
    assert isinstance(figure, Figure)
    assert len(figure.axes) == len(diagnosis.rotations)
