"""Test names in Markdown and on terminals."""

import pytest

from rope_patch.utils.escaping import escape_markdown, markdown_code, printable


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
