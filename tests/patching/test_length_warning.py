"""Test that a model warns once when a text outgrows the length that it was patched for."""

import copy
import logging

import pytest
import torch
from helpers.evaluations import request
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    forward,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from helpers.vision_models import SAMPLE, image_positions, image_prompt, vision_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache

import rope_patch
from rope_patch.evaluation import pipeline
from rope_patch.patching.length_warning import silence_length_warnings


@pytest.fixture
def warnings(caplog):
    """Return a function that returns the warnings of outgrown lengths so far."""
    caplog.set_level(logging.WARNING, "rope_patch")
    return lambda: [r.getMessage() for r in caplog.records if "outgrew" in r.getMessage()]


METHODS = [
    ("yarn", {}),
    ("linear", {}),
    ("longrope", {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_once_beyond_the_patched_length(method, options, warnings):
    model = make_model()
    rope_patch.patch(model, method, factor=4, **options)
    forward(model, tokens(TARGET))
    assert warnings() == []
    forward(model, tokens(TARGET + 1))
    assert len(warnings()) == 1
    assert f"{TARGET + 1} tokens outgrew the {TARGET} " in warnings()[0]
    forward(model, tokens(TARGET + 8))
    assert len(warnings()) == 1


def test_positions_of_an_image_count_instead_of_its_tokens(warnings):
    """The first of four axes, which counts tokens, is for the mask alone."""
    model, inputs = vision_model(SAMPLE[0]), image_prompt(90, 5)
    positions = image_positions(90, 5)
    count = positions.shape[2]
    length = int(positions.max()) + 1
    assert length < count
    four = torch.cat([torch.arange(count).expand(1, 1, -1), positions])
    for patched_length, expected in ((length, 0), (length - 1, 1)):
        rope_patch.patch(model, "yarn", length=patched_length)
        with torch.no_grad():
            model(**inputs, position_ids=four, use_cache=False)
        assert len(warnings()) == expected
    assert f"{length} tokens outgrew" in warnings()[0]


def test_cached_tokens_count(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", length=TRAINED + 10)
    step_by_step(model, tokens(TRAINED + 10), TRAINED)
    assert warnings() == []
    step_by_step(model, tokens(TRAINED + 12), TRAINED)
    assert len(warnings()) == 1
    assert f"{TRAINED + 11} tokens" in warnings()[0]


def test_generate(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", length=TRAINED + 10)
    arguments = {"do_sample": False, "pad_token_id": 0}
    model.generate(tokens(TRAINED), max_new_tokens=10, **arguments)
    assert warnings() == []
    # The last new token is not read, so there are two beyond the length.
    model.generate(tokens(TRAINED), max_new_tokens=13, **arguments)
    assert len(warnings()) == 1


def test_static_cache(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", length=TRAINED + 10)
    arguments = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    arguments["disable_compile"] = True
    model.generate(tokens(TRAINED), max_new_tokens=8, **arguments)
    assert warnings() == []
    model.generate(tokens(TRAINED), max_new_tokens=16, **arguments)
    assert len(warnings()) == 1


def test_packed_and_padded_rows_are_measured_by_their_positions(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", length=TRAINED + 1)
    documents = torch.arange(TRAINED).repeat(3)[None]
    forward(model, tokens(3 * TRAINED), position_ids=documents)
    ids, mask = padded([tokens(TRAINED), tokens(10)], "left")
    padding = torch.zeros(2, TRAINED, dtype=torch.long)
    ids, mask = torch.cat([padding, ids], 1), torch.cat([padding, mask], 1)
    forward(model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert warnings() == []
    forward(model, tokens(TRAINED + 2), position_ids=torch.arange(TRAINED + 2)[None])
    assert len(warnings()) == 1


def test_padding_is_not_counted_where_the_mask_alone_tells_it(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", length=TRAINED + 1)
    ids, mask = padded([tokens(2 * TRAINED), tokens(TRAINED + 1)], "left")
    forward(model, ids[1:], attention_mask=mask[1:])
    assert warnings() == []
    forward(model, ids, attention_mask=mask)
    assert len(warnings()) == 1


@pytest.mark.parametrize("arguments", [{"length": TRAINED + 8}, {}])
def test_methods_that_follow_the_length_have_no_limit(arguments, warnings):
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn", **arguments)
    forward(model, tokens(TARGET))
    assert warnings() == []


def test_unpatched_model_says_nothing(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2).undo()
    assert len(model.model._forward_pre_hooks) == 0
    forward(model, tokens(TARGET))
    assert warnings() == []


def test_each_model_warns_for_itself(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    twin = copy.deepcopy(model)
    forward(model, tokens(TARGET))
    forward(twin, tokens(TARGET))
    assert len(warnings()) == 2


def test_same_patch_in_effect_again_does_not_repeat_itself(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    forward(model, tokens(TARGET))
    with rope_patch.patch(model, "linear", factor=8):
        forward(model, tokens(TARGET))
    forward(model, tokens(TARGET))
    assert len(warnings()) == 1


def test_patches_of_one_model_warn_again_only_beyond_a_larger_length(warnings):
    model = make_model()
    for factor in (2, 2, 1.5, 3, 3):
        with rope_patch.patch(model, "yarn", factor=factor):
            forward(model, tokens(TARGET))
    assert [message.split(" outgrew the ")[1].split()[0] for message in warnings()] == [
        str(2 * TRAINED),
        str(3 * TRAINED),
    ]


def test_silence(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    with silence_length_warnings():
        forward(model, tokens(TARGET))
    assert warnings() == []
    forward(model, tokens(TARGET))
    assert len(warnings()) == 1


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="models themselves fail on the meta device")
@pytest.mark.parametrize("has_positions", [True, False])
def test_tensors_without_values_are_not_read(has_positions, warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    positions = torch.arange(TARGET)[None] if has_positions else None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = None if positions is None else mode.from_tensor(positions)
        model(mode.from_tensor(tokens(TARGET)), position_ids=fake)
    model.to("meta")
    meta = None if positions is None else positions.to("meta")
    assert model(tokens(TARGET).to("meta"), position_ids=meta).logits.shape[1] == TARGET
    assert warnings() == []


def test_static_cache_without_positions_is_measured_by_its_tokens(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    cache = StaticCache(config=model.config, max_cache_len=TARGET)
    forward(model, tokens(TRAINED), past_key_values=cache)
    forward(model, tokens(TRAINED), past_key_values=cache)
    assert warnings() == []
    forward(model, tokens(1), past_key_values=cache)
    assert len(warnings()) == 1


def test_evaluations_are_silent(monkeypatch, tmp_path, warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    monkeypatch.setattr(pipeline, "_evaluate", lambda *_: forward(model, tokens(TARGET)))
    pipeline.evaluate(request(tmp_path))
    assert warnings() == []
    forward(model, tokens(TARGET))
    assert len(warnings()) == 1


@pytest.mark.parametrize(
    ("method", "options", "warns"),
    [
        ("rerope", {"length": 2 * TRAINED}, False),  # it serves any length
        ("rerope", {}, False),
        ("self-extend", {"group": 2, "window": 16}, True),
        ("string", {}, True),
    ],
)
def test_position_maps_warn_where_their_distances_end(caplog, method, options, warns):
    model = make_model()
    rope_patch.patch(model, method, **options)
    with caplog.at_level("WARNING", logger="rope_patch"):
        forward(model, tokens(3 * TRAINED))
    assert ("outgrew" in caplog.text) is warns
