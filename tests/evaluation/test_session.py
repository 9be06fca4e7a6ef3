"""Test what stored answers depend on besides their prompts."""

import json

import pytest
import torch
from helpers.method_names import frequency_methods, position_maps
from helpers.tiny_models import TRAINED, forward, make_config, make_model, tokens

import rope_patch
from rope_patch.evaluation.session import _other_config, _rotation_identity
from rope_patch.utils.provenance import config_fingerprint, fingerprint


def identity(method, length=2 * TRAINED, end=2 * TRAINED, **options):
    return _rotation_identity(rope_patch.patch(make_model(), method, **options), length, end)


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_temperatures_have_answers_of_their_own(method):
    options = {"factor": 4} if method == "yarn" else {}
    identities = [
        identity(method, temperature=temperature, **options)
        for temperature in (None, "log-n", "llama4", 2)
    ]
    assert all(identities.count(each) == 1 for each in identities)


def test_a_temperature_alone_is_not_the_plain_model():
    assert identity("dynamic-yarn", end=TRAINED, length=TRAINED // 2) is None
    assert identity("default", factor=1, temperature=2) == {"temperature": ["constant", 2, TRAINED]}


@pytest.mark.parametrize("temperature", ["log-n", "llama4", "drope:0.1"])
def test_a_temperature_of_1_shares_the_plain_models_answers(temperature):
    assert identity("default", factor=1, temperature=temperature, end=TRAINED) is None
    assert identity("default", factor=1, temperature=temperature, end=TRAINED + 1) is not None


def test_position_maps_have_answers_of_their_own():
    requests: list[tuple[str, dict]] = [
        (name, {"groups": (2, 4)} if name == "dpe" else {}) for name in position_maps()
    ]
    requests += [
        ("rerope", {"window": 8}),
        ("rerope", {"temperature": "none"}),
        ("rerope", {"on": "yarn:1.5"}),
        ("self-extend", {"window": TRAINED // 4, "group": 4}),
    ]
    identities = [identity(name, **options) for name, options in requests]
    assert None not in identities
    assert all(identities.count(each) == 1 for each in identities)


@pytest.mark.parametrize("name", ["rerope", "self-extend", "jet-long"])
def test_position_maps_share_the_plain_models_answers_up_to_the_trained_length(name):
    assert identity(name, length=TRAINED, end=TRAINED) is None
    assert identity(name, length=TRAINED, end=TRAINED + 1) is not None


def test_string_changes_answers_within_the_trained_length():
    assert identity("string", length=TRAINED, end=TRAINED) is not None


@pytest.mark.parametrize("method", ["dynamic-yarn", "self-extend"])
def test_only_equal_bits_share_the_plain_models_answer(method):
    short = {"length": TRAINED // 2, "end": TRAINED}
    assert identity(method, **short) is None
    assert identity(method, **short, kernels="hf") is None
    assert identity(method, **short, kernels="reference") == {"kernels": "reference"}


def test_the_same_weights_under_another_config_have_answers_of_their_own(tmp_path):
    """An edited theta is in no weight: the plain model of before answered for that of now."""
    model = make_model()
    weights, config = fingerprint(model), config_fingerprint(model.config)
    model.config.rope_parameters["rope_theta"] *= 100
    edited = config_fingerprint(model.config)
    model.config._name_or_path = "elsewhere"
    assert config_fingerprint(model.config) == edited != config
    assert fingerprint(model) == weights
    found = [_other_config(tmp_path, weights, each) for each in (config, edited, config, edited)]
    assert found == [None, edited, None, edited]  # the first keeps the keys of earlier releases
    assert _other_config(tmp_path, "other weights", edited) is None


def test_a_config_that_was_not_noted_is_no_guess(tmp_path, caplog):
    """An earlier release noted none, which is said; a damaged note gives answers of their own."""
    (tmp_path / "answers-0.jsonl").touch()
    assert _other_config(tmp_path, "weights", "config") is None
    assert "did not note the config" in caplog.text
    note = tmp_path / "configs.jsonl"
    note.write_bytes(note.read_bytes().replace(b"config", b"confiq"))
    assert _other_config(tmp_path, "weights", "config") == "config"
    assert "damaged" in caplog.text


def test_what_a_dynamic_method_starts_from_has_answers_of_its_own():
    """Beyond the trained length both follow the text, one from the config's own scaling on."""
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    found = []
    for start in ("running", "unscaled"):
        model = make_model(rope_parameters=scaling)
        handle = rope_patch.patch(model, "dynamic-yarn", trained_length=TRAINED, start=start)
        found.append(_rotation_identity(handle, TRAINED, 2 * TRAINED))
    assert found[0] != found[1]


def test_a_dynamic_method_on_some_layers_has_answers_of_its_own():
    """Beyond the trained length, layers with a window rotate as before unless they are named."""
    found = []
    for layer_types in (None, ["full_attention"], ["full_attention", "sliding_attention"]):
        handle = rope_patch.patch(make_model("gemma3"), "dynamic-yarn", layer_types=layer_types)
        found.append(_rotation_identity(handle, TRAINED, 2 * TRAINED))
    assert found[0] == found[1] != found[2]
    assert len(identity("dynamic-yarn", length=TRAINED)) == 2  # as earlier releases stored it


# Of each family one that equals another at some length, and the kernels that round otherwise.
FACTORS = {"yarn": 2, "linear": 2, "ntk": 2, "ntk-by-parts": 2}
KERNELS = ("yarn", "dynamic-yarn", "self-extend")


def make_in(dtype):
    """Return a model that is made in a dtype, as loaded in it: its frequencies are in float32."""
    torch.manual_seed(0)
    return type(make_model())._from_config(make_config("llama"), dtype=dtype).eval()


def requests():
    """Yield every method that a Llama takes without options, and some by other kernels."""
    for name in [*frequency_methods(), *position_maps()]:
        model = make_model()
        for given in ({}, {"factor": FACTORS.get(name, 4)}):
            try:
                rope_patch.patch(model, name, **given).undo()
            except (ValueError, TypeError):  # it needs options, or takes no factor
                continue
            yield name, given
            if name in KERNELS:
                yield from ((name, {**given, "kernels": each}) for each in ("hf", "reference"))
            break


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [TRAINED, 2 * TRAINED])
def test_methods_that_share_an_answer_give_the_same_bits(length, dtype):
    """Answers are shared by their key alone, so equal keys must mean equal logits."""
    by_key = {"null": [("plain", forward(make_in(dtype), tokens(length)))]}
    for name, given in requests():
        model = make_in(dtype)
        handle = rope_patch.patch(model, name, **given)
        key = json.dumps(_rotation_identity(handle, length, length), sort_keys=True)
        by_key.setdefault(key, []).append((f"{name} {given}", forward(model, tokens(length))))
    for (first, expected), *others in by_key.values():
        for name, got in others:
            assert got.equal(expected), f"{name} shares the answers of {first}"
    shared = [sorted(name.split()[0] for name, _ in each) for each in by_key.values()]
    assert len(by_key) > 5
    if length == TRAINED:
        assert {"plain", "dynamic-yarn", "rerope"} <= set(max(shared, key=len))
    else:
        assert ["dynamic-yarn", "yarn"] in shared
