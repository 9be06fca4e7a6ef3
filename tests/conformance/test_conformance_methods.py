"""Test every method on published geometries against transformers or its formula."""

import json
from pathlib import Path

import pytest
from comparison import pairs, source
from config_scalings import PUBLISHED_SCALINGS
from published import ALL

import rope_patch
from rope_patch.rope_config import read_geometries

GOLDEN = json.loads((Path(__file__).parents[1] / "assets" / "golden.json").read_text())


@pytest.mark.parametrize("model", ALL, ids=str)
def test_geometry_matches_the_published_config(model):
    config = model.config()
    geometry = read_geometries(config, start="unscaled")[model.layer_type]
    assert getattr(config, "head_dim", None) in (None, model.head_dim)
    assert geometry.head_dim == model.head_dim
    assert geometry.rotary_dim == model.rotary_dim
    assert geometry.theta == model.theta
    assert geometry.trained_length == model.trained_length


def test_models_cover_at_least_8_repositories():
    assert len({model.repository for model in ALL}) >= 8
    assert len({model.name for model in ALL}) == len({model.short for model in ALL}) == len(ALL)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.short)
@pytest.mark.parametrize("method", rope_patch.list_methods())
def test_method_matches_its_reference(method, model):
    try:
        compared_pairs = list(pairs(method, model))
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert compared_pairs
    # transformers computes in float32; formulas and our methods in float64.
    dynamic = method.startswith("dynamic")  # compared with transformers' default, too
    tolerance = 2e-6 if dynamic or source(method, model) == "transformers" else 1e-12
    for pair in compared_pairs:
        assert pair.difference() < tolerance


@pytest.mark.parametrize("scaling", PUBLISHED_SCALINGS, ids=str)
def test_method_matches_the_published_config(scaling):
    compared_pairs = list(scaling.pairs())
    assert len(compared_pairs) == len(scaling.lengths)
    for pair in compared_pairs:
        assert pair.difference() < 2e-6


def test_all_published_scalings_are_compared():
    assert {scaling.model.name for scaling in PUBLISHED_SCALINGS} == {
        m.name for m in ALL if m.scaling
    }
    for scaling in PUBLISHED_SCALINGS:  # options equal the fields of config.json
        for name, value in scaling.model.scaling.items():
            if name in scaling.options:
                assert scaling.options[name] == value


def test_golden_vectors_cover_methods_that_transformers_lacks():
    golden_methods = {row["method"].split(" (")[0] for row in GOLDEN}
    assert {m for m in rope_patch.list_methods() if source(m, ALL[0]) == "golden"} <= golden_methods
