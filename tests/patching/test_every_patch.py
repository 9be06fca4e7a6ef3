"""Test what holds of every patch: undo, copies, saving, and defaults of torch that do not matter.

One table has the methods, what changes with them, and the models; a new method is a row.
"""

import copy
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.tiny_models import (
    FAMILIES,
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_config,
    make_model,
    step_by_step,
    tokens,
)
from transformers import AutoModelForCausalLM

import rope_patch

SETS = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
ORIGIN = {"rope_theta": 1e4, "original_max_position_embeddings": TRAINED // 4}
RAMP = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Row:
    """A patch of a model.

    Attributes:
        method: The method.
        options: Its options, and other arguments of `patch`.
        family: Of the model.
        scaling: The config's own scaling, if any.
        native: Whether plain transformers reads a saved one; None for those whose saved form other
            tests compare.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    scaling: dict[str, Any] | None = None
    native: bool | None = None

    def __str__(self):
        options = [f"{k}={v}" for k, v in self.options.items() if not isinstance(v, list)]
        own = [] if self.scaling is None else [f"on {self.scaling['rope_type']}"]
        return " ".join([self.family, self.method, *options, *own])

    def model(self):
        changes = {} if self.scaling is None else {"rope_parameters": copy.deepcopy(self.scaling)}
        return make_model(self.family, **changes)

    def patch(self, model):
        return rope_patch.patch(model, self.method, **self.options)


EVERYWHERE = [
    Row(method, {"factor": 4, **options}, family)
    for method, options in (("linear", {}), ("yarn", {}), ("longrope", SETS), ("dynamic-yarn", {}))
    for family in FAMILIES
]
STATIC = [
    Row(method, {"factor": 4, **options})
    for method, options in (
        ("ntk", {}),
        ("ntk-by-parts", {}),
        ("llama3", {}),
        ("abf", {}),
        ("proportional", {"partial_rotary_factor": 0.5}),
        ("yarn", {"truncate": False}),
        ("yarn", {"mscale": 0.707, "mscale_all_dim": 1.2}),
    )
]
MIXED = [
    Row(f"mixed-{inner}", {"factor": 4, **options}, family, native=is_native)
    for inner, options, is_native in (
        ("linear", {}, True),
        ("ntk", {}, True),
        ("ntk-by-parts", {"beta_fast": 4}, True),
        ("abf", {}, True),
        ("yarn", {"beta_fast": 4}, False),
        ("longrope", {"long_factor": LONG_FACTOR}, False),
    )
    for family in (["llama", "gemma3"] if inner in ("linear", "yarn") else ["llama"])
]
SCALED = [
    Row("ntk", {"factor": 8}, scaling={"rope_type": kind, "factor": 4.0, **ORIGIN, **options})
    for kind, options in (("llama3", RAMP), ("yarn", {}), ("linear", {}), ("longrope", SETS))
]
NOPE = [
    Row("nope", options, family, native="temperature" not in options)
    for options in ({}, {"length": TARGET}, {"temperature": "drope:0.412"})
    for family in ("llama", "qwen3", "gemma3")
]
TEMPERATURES = [
    Row("yarn", {"factor": 4, "temperature": "llama4:0.3"}, native=False),
    Row("yarn", {"factor": 4, "temperature": 2.0}, "qwen3", native=False),
]
KERNELS = [
    Row("yarn", {"factor": 4, "temperature": 2.0, "kernels": "hf"}, "qwen3"),
    Row("yarn", {"factor": 4, "temperature": 2.0, "kernels": "reference"}, "qwen3"),
    Row("yarn", {"factor": 4, "kernels": "reference"}, "gemma3"),
]
START_TOKENS = [
    Row("longrope", {"factor": 4, "start_tokens": 5, **SETS, **same}, family, native=False)
    for same in ({}, {"short_factor": LONG_FACTOR})
    for family in ("llama", "gemma3", "phi3")
]
MAPS = [
    Row(method, options, native=False)
    for method, options in (("rerope", {"window": 16}), ("self-extend", {}), ("dca", {}))
]
SPECIAL = [*MIXED, *NOPE, *TEMPERATURES, *START_TOKENS, *MAPS]
ROWS = [*EVERYWHERE, *STATIC, *SCALED, *KERNELS, *SPECIAL]
# Further families of a method that others here have.
SLOW = [row for row in EVERYWHERE if row.family in ("qwen2", "gemma") and row.method != "yarn"]
SLOW += [row for row in EVERYWHERE if row.family == "gemma2" and row.method != "dynamic-yarn"]
SLOW += [row for row in NOPE if row.family == "qwen3"]
# The first of each kind, which are pickled, too.
KINDS = (EVERYWHERE, KERNELS, MIXED, NOPE, TEMPERATURES, START_TOKENS, MAPS)
FIRST = [rows[0] for rows in KINDS]
# Those of a kind and a family differ in numbers, and in the config that is saved.
ALIKE = [
    row
    for rows in KINDS[1:]
    for place, row in enumerate(rows)
    if row.family in [each.family for each in rows[:place]]
]


def each(rows, slow=SLOW):
    params = [pytest.param(r, marks=pytest.mark.slow if r in slow else ()) for r in rows]
    return pytest.mark.parametrize("row", params, ids=str)


def snapshot(model):
    """Return the attributes and buffers of all modules: tensors with dtype, others by identity."""
    values = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_buffers", "_parameters"):
                tensors = {k: t for k, t in value.items() if t is not None}
                values[name, key] = {k: (t.dtype, t.clone()) for k, t in tensors.items()}
            elif key == "_non_persistent_buffers_set" or "hooks" in key:
                values[name, key] = copy.copy(value)
            else:
                values[name, key] = value
    return values


def assert_same(after, before):
    assert after.keys() == before.keys()
    for key, value in before.items():
        if key[1] in ("_buffers", "_parameters"):
            assert after[key].keys() == value.keys()
            for name, (dtype, tensor) in value.items():
                assert after[key][name][0] == dtype
                assert torch.equal(after[key][name][1], tensor), (key, name)
        else:
            assert after[key] is value or after[key] == value, key


@each(ROWS, slow=[*SLOW, *ALIKE])
def test_undo_restores_every_bit(row):
    model = row.model()
    plain = {length: logits(model, length) for length in (LONG, SHORT)}
    config, text = model.config, copy.deepcopy(model.config.to_dict())
    before = snapshot(model)
    handle = row.patch(model)
    assert_differs(logits(model, LONG), plain[LONG])
    logits(model, SHORT)  # methods with two sets of frequencies switch in this call
    handle.undo()
    assert_same(snapshot(model), before)
    assert model.config is config
    assert config.to_dict() == text
    for length, expected in plain.items():
        assert logits(model, length).equal(expected)


COPIED = [row for row in EVERYWHERE if row.family in ("llama", "gemma3")] + KERNELS + SPECIAL


@each(COPIED, slow=[*SLOW, *ALIKE])
def test_copies_are_undone_independently(row):
    require_independent(row, copy.deepcopy)


@each(COPIED, slow=[row for row in COPIED if row not in FIRST])
def test_pickled_models_are_undone_independently(row):
    require_independent(row, lambda model: pickle.loads(pickle.dumps(model)))


def require_independent(row, duplicate):
    model = row.model()
    plain, length = logits(model), model.config.max_position_embeddings
    row.patch(model)
    patched = logits(model)
    twin = duplicate(model)
    assert logits(twin).equal(patched)
    assert twin.config.max_position_embeddings == model.config.max_position_embeddings

    rope_patch.unpatch(twin)
    assert logits(twin).equal(plain)
    assert twin.config.max_position_embeddings == length
    assert logits(model).equal(patched)
    assert rope_patch.current(model).active

    second = duplicate(model)
    rope_patch.unpatch(model)
    assert logits(model).equal(plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert logits(second).equal(patched)


def without_temperature(row):
    """Return the model that transformers alone reads: unpatched, not an approximation.

    A temperature alone is left out, because frequencies have a form in the config.
    """
    model = row.model()
    options = dict(row.options)
    if options.pop("temperature", None) is not None:
        rope_patch.patch(model, row.method, **options)
    return model


def is_native(row):
    nested = row.family == "gemma3" and row.method.startswith("mixed")
    return row.native and not (OLD_TRANSFORMERS and (nested or row.method == "nope"))


@each(SPECIAL)
def test_load_restores_the_patch(row, tmp_path, caplog):
    model = row.model()
    plain, saved = logits(model), row.patch(model)
    rope_patch.save(model, tmp_path)
    assert json.loads((tmp_path / "rope_patch.json").read_text())["native"] is is_native(row)
    assert ("with rope_patch.load" in caplog.text) is not is_native(row)

    alone = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert rope_patch.current(alone) is None
    loaded = rope_patch.load(tmp_path)
    handle = rope_patch.current(loaded)
    assert handle.method == saved.method
    assert (handle.trained_length, handle.length) == (saved.trained_length, saved.length)
    expected = model if is_native(row) else without_temperature(row)
    for length in (SHORT, LONG):
        assert logits(loaded, length).equal(logits(model, length))
        assert_close(logits(alone, length), logits(expected, length))
    handle.undo()
    assert logits(loaded).equal(plain)
    assert loaded.config.max_position_embeddings == TRAINED
    assert loaded.config.rope_parameters == make_config(row.family).rope_parameters


@each([*NOPE[::3], *START_TOKENS[:2], *MAPS[:2]])
def test_gradients_reach_every_weight(row):
    model, ids = row.model().train(), tokens(LONG)
    row.patch(model)
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())


# -- torch's defaults ------------------------------------------------------------------------------


@pytest.fixture
def torch_defaults():
    """Restore torch's defaults."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def with_unknown_norms(model):
    """Give norms a class of their own, of which nothing has been found out yet."""
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.__class__ = type("Norm", (type(module),), {})
    return model


DEFAULTS = [
    Row("yarn", {"factor": 4}),
    Row("dynamic-yarn", {}, "qwen3"),
    Row("dynamic-yarn", {}, "gemma3"),
    Row("longrope", {"factor": 4, "long_factor": LONG_FACTOR, "start_tokens": 4}),
]


@each(DEFAULTS)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"])
def test_torchs_defaults_do_not_change_the_patch(row, default, torch_defaults):
    expected, model = row.model(), with_unknown_norms(row.model())
    plain, reference = logits(model), row.patch(expected)
    state = torch.get_rng_state()
    if default == "meta":
        torch.set_default_device("meta")
        with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
            handle = row.patch(model)
        torch.set_default_device(None)
    else:
        torch.set_default_dtype(default)
        handle = row.patch(model)
        assert torch.get_default_dtype() == default
        torch.set_default_dtype(torch.float32)
    assert torch.get_rng_state().equal(state)
    assert handle.summary() == reference.summary()
    for own, other in zip(model.modules(), expected.modules(), strict=True):
        assert set(vars(own)) == set(vars(other))  # deferred norms among them
    assert not any(buffer.is_meta for buffer in model.buffers())
    ids = tokens(TRAINED + 3)
    assert step_by_step(model, ids, TRAINED - 1).equal(step_by_step(expected, ids, TRAINED - 1))
    with torch.device("meta"):
        handle.undo()
    assert logits(model).equal(plain)
