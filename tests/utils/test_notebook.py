"""Test the HTML that notebooks show: the text's facts, escaped."""

from html.parser import HTMLParser

import pytest
from helpers.tiny_models import make_model
from matplotlib.figure import Figure

import rope_patch
from rope_patch.utils.notebook import text_html


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
