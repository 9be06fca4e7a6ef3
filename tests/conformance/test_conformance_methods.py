"""Every method on the geometries of published models, against transformers or its formula."""

import json
from pathlib import Path

import pytest
from comparison import pairs, source
from config_scalings import OWN_SCALINGS
from published import ALL

import rope_patch
from rope_patch.rope_config import read_geometries

GOLDEN = json.loads((Path(__file__).parents[1] / "assets" / "golden.json").read_text())


@pytest.mark.parametrize("model", ALL, ids=str)
def test_the_geometry_is_that_of_the_published_config(model):
    config = model.config()
    geometry = read_geometries(config, start="unscaled")[model.layer_type]
    assert getattr(config, "head_dim", None) in (None, model.head_dim)
    assert geometry.head_dim == model.head_dim
    assert geometry.rotary_dim == model.rotary_dim
    assert geometry.theta == model.theta
    assert geometry.trained_length == model.trained_length


def test_there_are_enough_models():
    assert len({model.repository for model in ALL}) >= 8
    assert len({model.name for model in ALL}) == len({model.short for model in ALL}) == len(ALL)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.short)
@pytest.mark.parametrize("method", rope_patch.list_methods())
def test_method_computes_what_transformers_computes(method, model):
    try:
        compared = list(pairs(method, model))
    except NotImplementedError as missing:
        pytest.skip(str(missing))
    assert compared
    # transformers computes in float32; formulas are in float64, as we are.
    dynamic = method.startswith("dynamic")  # up to the trained length beside transformers' default
    close = 2e-6 if dynamic or source(method, model) == "transformers" else 1e-12
    for pair in compared:
        assert pair.difference() < close


@pytest.mark.parametrize("own", OWN_SCALINGS, ids=str)
def test_method_computes_what_the_published_config_asks_for(own):
    compared = list(own.pairs())
    assert len(compared) == len(own.lengths)
    for pair in compared:
        assert pair.difference() < 2e-6


def test_every_published_scaling_is_compared():
    assert {own.model.name for own in OWN_SCALINGS} == {m.name for m in ALL if m.scaling}
    for own in OWN_SCALINGS:  # the numbers are those of config.json
        for name, value in own.model.scaling.items():
            if name in own.options:
                assert own.options[name] == value


def test_golden_vectors_hold_what_transformers_lacks():
    held = {row["method"].split(" (")[0] for row in GOLDEN}
    assert {m for m in rope_patch.list_methods() if source(m, ALL[0]) == "golden"} <= held
