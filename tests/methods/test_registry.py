"""Test what register_method takes and refuses."""

from dataclasses import dataclass

import pytest
import torch
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.encodings import BucketsSite, LearnedTableSite, SinusoidalTableSite, SlopesSite
from rope_patch.methods import (
    ENCODING_METHODS,
    Frequencies,
    Method,
    find_method,
    option,
    outside_methods,
    registered_methods,
)

pytestmark = pytest.mark.usefixtures("own_registry")
ABOUT = {"paper": "nobody, 2026", "training": "needed"}


def new_class(frozen=True, **body):
    """Return a new dataclass that derives from Method."""

    def frequencies(self, geometry, seq_len=None):
        return Frequencies(geometry.inv_freq() / self.factor)

    cls = type("Mine", (Method,), {"frequencies": frequencies, **body})
    return dataclass(frozen=True, kw_only=True)(cls) if frozen else cls


def test_a_registered_class_is_a_method_like_ours():
    mine = rope_patch.register_method("mine", **ABOUT)(new_class(__doc__="\n    What it does.\n"))
    assert find_method("mine") is registered_methods()["mine"] is mine
    assert rope_patch.list_methods()["mine"] == "What it does."
    assert list(outside_methods()) == ["mine"]
    geometry = {"head_dim": 16, "theta": 1e4, "trained_length": 64, "factor": 4}
    got = rope_patch.frequencies("mine", **geometry).inv_freq
    expected = torch.tensor([1e4 ** (-i / 8) / 4 for i in range(8)], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["", "a,b", "a b", "-a", "a/b", "ä", "a-", "none", "a\n"])
def test_odd_names_are_refused(name):
    with pytest.raises((ValueError, TypeError), match="name"):
        rope_patch.register_method(name, **ABOUT)


@pytest.mark.parametrize("missing", ["paper", "training"])
def test_paper_and_training_must_be_texts(missing):
    with pytest.raises(TypeError, match=f"{missing} must be a text, got None"):
        rope_patch.register_method("mine", **{**ABOUT, missing: None})


@pytest.mark.parametrize("what", [int, 3, lambda geometry: None])
def test_what_is_no_method_is_refused(what):
    with pytest.raises(TypeError, match=r"derives from rope_patch\.methods\.Method"):
        rope_patch.register_method("mine", **ABOUT)(what)


def plain_dataclass_of_its_base():
    return new_class(frozen=False)


def abstract():
    return dataclass(frozen=True)(type("Mine", (Method,), {}))


def shadows_an_argument():
    return new_class(length=option("a length", default=1), __annotations__={"length": int})


def has_no_help():
    return new_class(share=0.5, __annotations__={"share": float})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (plain_dataclass_of_its_base, r"no dataclass; write @dataclass\(frozen=True"),
        (abstract, "lacks frequencies"),
        (shadows_an_argument, "'length' has the name of an argument"),
        (has_no_help, "'share' has no help text"),
    ],
)
def test_unfit_classes_are_refused_and_not_registered(make, message):
    with pytest.raises(ValueError, match=message):
        rope_patch.register_method("mine", **ABOUT)(make())
    assert find_method("mine") is None


def test_a_name_of_another_class_is_refused_and_the_first_one_stays():
    linear = find_method("linear")
    with pytest.raises(ValueError, match=r"'linear' is taken by rope_patch\.methods\.linear"):
        rope_patch.register_method("linear", **ABOUT)(new_class())
    assert find_method("linear") is linear
    mine = rope_patch.register_method("mine", **ABOUT)(new_class())
    other = new_class()
    other.__qualname__ = "Other"
    with pytest.raises(ValueError, match="'mine' is taken by"):
        rope_patch.register_method("mine", **ABOUT)(other)
    assert find_method("mine") is mine


def test_one_class_has_one_name():
    mine = rope_patch.register_method("mine", **ABOUT)(new_class())
    with pytest.raises(ValueError, match="registered as 'mine' already"):
        rope_patch.register_method("second", **ABOUT)(mine)
    assert mine.name == "mine"


def test_the_same_lines_may_run_again():
    rope_patch.register_method("mine", **ABOUT)(new_class())
    again = new_class()
    assert rope_patch.register_method("mine", **ABOUT)(again) is find_method("mine") is again


# -- names of methods for other encodings ----------------------------------------------------------


@pytest.mark.parametrize("name", ENCODING_METHODS)
def test_models_that_rotate_refuse_methods_for_other_encodings_with_the_page(name):
    with pytest.raises(rope_patch.Refused, match=rf"{name}' .*other-encodings\.md"):
        rope_patch.patch(make_model("llama"), name, factor=2)


def test_misspelled_names_of_other_encodings_are_corrected():
    with pytest.raises(rope_patch.Refused, match="did you mean 'log-tail'"):
        rope_patch.patch(make_model("llama"), "log-tial", factor=2)


def test_all_names_are_listed_that_no_rotary_method_has():
    """Of the page's methods that extend tables, slopes and buckets."""
    sites = (LearnedTableSite, SinusoidalTableSite, SlopesSite, BucketsSite)
    names = {name for site in sites for name in site.methods}
    assert set(ENCODING_METHODS) == names - set(rope_patch.list_methods())
