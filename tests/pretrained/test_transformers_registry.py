"""Test registration of our methods with transformers: names, conflicts, and invalid values."""

import math
import subprocess
import sys
import threading

import pytest
import torch
from helpers.method_names import position_maps
from helpers.tiny_models import (
    TARGET,
    logits,
    make_config,
    make_model,
)
from rope_type_configs import (
    BASE,
    LENGTH,
    LENGTH_DEPENDENT,
    NATIVE_ROPE_TYPES,
    STATIC,
    make_named_config,
    registry,
)
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch

pytestmark = pytest.mark.usefixtures("restored_registry")


def test_register_adds_and_unregister_removes_all_methods():
    before = registry()
    rope_patch.register_rope_types()
    now, mixin = registry()
    assert now[: len(before[0])] == before[0]  # transformers' functions are unchanged
    added = [name for name, _ in now[len(before[0]) :]]
    maps = position_maps()  # no rotary module can do what they do
    assert added == [
        name for name in rope_patch.list_methods() if name not in {*NATIVE_ROPE_TYPES, *maps}
    ]
    assert set(added) == {*STATIC, "clipped-abf", "clipped-yarn", *LENGTH_DEPENDENT}
    assert mixin.keys() - before[1].keys() == {f"_validate_{n}_rope_parameters" for n in added}
    rope_patch.register_rope_types()
    assert registry() == (now, mixin)
    rope_patch.unregister_rope_types()
    assert registry() == before
    rope_patch.unregister_rope_types()
    assert registry() == before


def test_import_registers_nothing():
    code = (
        "from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as known\n"
        "before = dict(known)\nimport rope_patch\nassert known == before\n"
        "rope_patch.register_rope_types()\nassert 'ntk' in known and known != before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def foreign_compute(config, device=None, seq_len=None, layer_type=None):
    return torch.ones(8), 1.0


def test_register_refuses_names_that_are_taken(monkeypatch):
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "abf", foreign_compute)
    before = registry()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'abf' is .*foreign_compute.*rope_patch\.patch"):
            rope_patch.register_rope_types()
        assert registry() == before
    rope_patch.unregister_rope_types()
    assert registry() == before


def test_unregister_keeps_functions_of_others(registered, caplog):
    ROPE_INIT_FUNCTIONS["abf"] = foreign_compute
    try:
        with pytest.raises(ValueError, match=r"'abf' is .*foreign_compute"):
            rope_patch.register_rope_types()
        assert ROPE_INIT_FUNCTIONS["abf"] is foreign_compute
        rope_patch.unregister_rope_types()
        assert ROPE_INIT_FUNCTIONS["abf"] is foreign_compute
        assert not {*STATIC, *LENGTH_DEPENDENT} - {"abf"} & ROPE_INIT_FUNCTIONS.keys()
        assert "'abf' was registered by somebody else" in caplog.text
    finally:
        del ROPE_INIT_FUNCTIONS["abf"]


def test_register_is_thread_safe(restored_registry):
    errors = []

    def back_and_forth():
        try:
            for _ in range(50):
                rope_patch.register_rope_types()
                rope_patch.unregister_rope_types()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=back_and_forth) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    rope_patch.register_rope_types()
    assert {*STATIC, *LENGTH_DEPENDENT} <= ROPE_INIT_FUNCTIONS.keys()


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_length_dependent_config_error_names_patch(registered, name):
    config = make_named_config(rope_type=name, **BASE, factor=4)
    with pytest.raises(
        ValueError, match=rf"follows the length.*rope_patch\.patch\(model, '{name}'"
    ):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", ["nope", "ntk"])
def test_temperature_in_a_config_is_refused(registered, name):
    config = make_named_config(rope_type=name, **BASE, factor=4, temperature="log-n")
    with pytest.raises(ValueError, match=r"temperature='log-n' beside it.*rope_patch\.patch"):
        AutoModelForCausalLM.from_config(config)


def test_transformers_dynamic_is_unchanged(registered):
    config = make_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, **BASE})
    model = AutoModelForCausalLM.from_config(config).eval()
    rope_patch.unregister_rope_types()
    twin = AutoModelForCausalLM.from_config(config).eval()
    twin.load_state_dict(model.state_dict())
    assert logits(model).equal(logits(twin))


BAD = {
    "no factor": ("ntk", {"factor": None}, "expected a factor.*got nothing"),
    "no length": ("ntk-by-parts", {LENGTH: None}, f"expected {LENGTH}.*got nothing"),
    "no length to derive from": ("abf", {LENGTH: None}, f"expected {LENGTH}.*got nothing"),
    "small factor": ("ntk", {"factor": 0.5}, "factor must be at least 1"),
    "words": ("ntk-by-parts", {"factor": "four"}, "factor must be a number, got 'four'"),
    "negative length": ("ntk-by-parts", {LENGTH: -1}, "whole number of tokens.*got -1"),
    "infinite": ("ntk", {"factor": math.inf}, "factor must be finite"),
    "small base": ("abf", {"new_theta": 100.0}, "new_theta must be above the model's own"),
    "betas": ("ntk-by-parts", {"beta_fast": 1, "beta_slow": 2}, "beta"),
    "theta": ("ntk", {"rope_theta": "big"}, "rope_theta must be a number"),
    "share": ("ntk", {"partial_rotary_factor": 0.2}, "rotary_dim must be even"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused(registered, case):
    name, change, message = BAD[case]
    parameters = {"rope_type": name, "factor": 4, **BASE, **change}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    config = make_named_config(**parameters)
    with pytest.raises(ValueError, match=f"(?s)rope_type '{name}' in rope_parameters: .*{message}"):
        AutoModelForCausalLM.from_config(config)


def test_transformers_validation_knows_our_fields(registered, library_log):
    make_named_config(rope_type="ntk-by-parts-2023-06", factor=4, partial_rotary_factor=1.0, **BASE)
    assert not library_log.text
    make_named_config(rope_type="ntk", factor=4, beta_fast=16, **BASE)
    assert (
        "Unrecognized keys in `rope_parameters` for 'rope_type'='ntk': {'beta_fast'}"
        in library_log.text
    )
    library_log.clear()
    make_named_config("gemma3", rope_type="ntk-by-parts", factor="4", **BASE)
    assert (
        "rope_type 'ntk-by-parts' in rope_parameters: factor must be a number" in library_log.text
    )
    library_log.clear()
    rope_patch.unregister_rope_types()
    make_named_config(rope_type="ntk", factor=4, **BASE)
    assert "Missing validation function" in library_log.text


def test_unknown_layer_type_is_refused(registered):
    config = make_named_config("gemma3", rope_type="ntk", factor=4, **BASE)
    with pytest.raises(ValueError, match="nothing for the layer type 'global'"):
        ROPE_INIT_FUNCTIONS["ntk"](config, layer_type="global")


def test_load_without_register_names_register(tmp_path):
    make_model().save_pretrained(tmp_path)
    make_named_config(rope_type="ntk", factor=4, **BASE).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"names the scaling 'ntk'.*rope_patch\.register_rope_types\(\)"
    ):
        rope_patch.load(tmp_path, "yarn", factor=4)
    rope_patch.register_rope_types()
    loaded = rope_patch.load(tmp_path, "yarn", factor=4)
    assert rope_patch.current(loaded).trained_length == TARGET
