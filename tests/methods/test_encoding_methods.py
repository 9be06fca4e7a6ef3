"""Test that names of methods for other encodings are known, and say where they belong."""

import pytest
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.methods.encoding_methods import ENCODING_METHODS
from rope_patch.patching.encodings.buckets import BucketsSite
from rope_patch.patching.encodings.slopes import SlopesSite
from rope_patch.patching.encodings.table import LearnedTableSite, SinusoidalTableSite
from rope_patch.utils.errors import Refused


def test_all_names_are_listed_that_no_rotary_method_has():
    sites = (LearnedTableSite, SinusoidalTableSite, SlopesSite, BucketsSite)
    names = {name for site in sites for name in site.methods}
    assert set(ENCODING_METHODS) == names - set(rope_patch.list_methods())


@pytest.mark.parametrize("name", ENCODING_METHODS)
def test_models_that_rotate_refuse_them_with_the_page(name):
    with pytest.raises(Refused, match=rf"{name}' extends .* \(docs/other-encodings\.md\)"):
        rope_patch.patch(make_model("llama"), name, factor=2)


def test_misspelled_names_are_corrected():
    with pytest.raises(Refused, match="did you mean 'log-tail'"):
        rope_patch.patch(make_model("llama"), "log-tial", factor=2)
