"""Test descriptions of errors: one printable line of limited length, and suggestions of names."""

import pickle

import pytest

from rope_patch.tasks.samples import TooShort
from rope_patch.utils.atomic_files import NotWritten
from rope_patch.utils.errors import describe_error, did_you_mean, one_line


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
