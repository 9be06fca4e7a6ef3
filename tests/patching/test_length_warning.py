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
from rope_patch.evaluation import evaluate
from rope_patch.patching import silence_length_warnings


@pytest.fixture
def warnings(caplog):
    """Return a function that returns the warnings of outgrown lengths so far."""
    caplog.set_level(logging.WARNING, "rope_patch")
    return lambda: [r.getMessage() for r in caplog.records if "outgrew" in r.getMessage()]


def read(length):
    return lambda model: forward(model, tokens(length))


def read_in_steps(length):
    return lambda model: step_by_step(model, tokens(length), TRAINED)


def generate(new, cache=None):
    settings = {"do_sample": False, "cache_implementation": cache, "disable_compile": True}
    return lambda model: model.generate(tokens(TRAINED), max_new_tokens=new, **settings)


def read_packed(model):
    """Read documents, none of which is longer than the trained length."""
    positions = torch.arange(TRAINED).repeat(3)[None]
    forward(model, tokens(3 * TRAINED), position_ids=positions)


def read_padded(with_positions):
    """Read two rows, of which the longer one has the trained length, behind as much padding."""

    def call(model):
        ids, mask = padded([tokens(TRAINED), tokens(10)], "left")
        padding = torch.zeros(2, TRAINED, dtype=torch.long)
        ids, mask = torch.cat([padding, ids], 1), torch.cat([padding, mask], 1)
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if with_positions else {}
        forward(model, ids, attention_mask=mask, **positions)

    return call


def read_into_static_cache(*lengths):
    def call(model):
        cache = StaticCache(config=model.config, max_cache_len=TARGET)
        for length in lengths:
            forward(model, tokens(length), past_key_values=cache)

    return call


SETS = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
# Method, options, what is within the length, what is not (if anything), and the length it reaches.
OUTGROWN = {
    "yarn": ("yarn", {"factor": 4}, read(TARGET), read(TARGET + 1), TARGET + 1),
    "linear": ("linear", {"factor": 4}, read(TARGET), read(TARGET + 1), TARGET + 1),
    "longrope": ("longrope", {"factor": 4, **SETS}, read(TARGET), read(TARGET + 1), TARGET + 1),
    "steps": ("yarn", {"length": 74}, read_in_steps(74), read_in_steps(76), 75),
    # The last new token is not read, so there are two beyond the length.
    "generate": ("yarn", {"length": 74}, generate(10), generate(13), 75),
    "static": ("yarn", {"length": 74}, generate(8, "static"), generate(16, "static"), 75),
    "static cache without positions": (
        "yarn",
        {"factor": 2},
        read_into_static_cache(TRAINED, TRAINED),
        read_into_static_cache(TRAINED, TRAINED, 1),
        2 * TRAINED + 1,
    ),
    "packed": ("yarn", {"length": 65}, read_packed, read(66), 66),
    "padded": ("yarn", {"length": 65}, read_padded(with_positions=True), read(66), 66),
    "masked": ("yarn", {"length": 65}, read_padded(with_positions=False), read(66), 66),
    "dynamic to a length": ("dynamic-yarn", {"length": 72}, read(TARGET), None, None),
    "dynamic": ("dynamic-yarn", {}, read(TARGET), None, None),
    "rerope": ("rerope", {"length": 2 * TRAINED}, read(3 * TRAINED), None, None),
    "self-extend": (
        "self-extend",
        {"group": 2, "window": 16},
        read(TRAINED),
        read(3 * TRAINED),
        3 * TRAINED,
    ),
    "string": ("string", {}, read(TRAINED), read(3 * TRAINED), 3 * TRAINED),
}


@pytest.mark.parametrize("case", OUTGROWN)
def test_one_warning_beyond_the_patched_length(case, warnings):
    method, options, within, beyond, length = OUTGROWN[case]
    model = make_model()
    rope_patch.patch(model, method, **options)
    within(model)
    assert warnings() == []
    if beyond is not None:
        for _ in range(2):
            beyond(model)
        assert len(warnings()) == 1
        assert f"{length} tokens outgrew the" in warnings()[0]


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


def test_unpatched_model_says_nothing(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2).undo()
    assert len(model.model._forward_pre_hooks) == 0
    forward(model, tokens(TARGET))
    assert warnings() == []


def test_each_model_warns_for_itself(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    for each in (model, copy.deepcopy(model)):
        forward(each, tokens(TARGET))
    assert len(warnings()) == 2


def test_patches_of_one_model_warn_again_only_beyond_a_larger_length(warnings):
    model = make_model()
    with rope_patch.patch(model, "yarn", factor=2):
        forward(model, tokens(TARGET))
        for factor in (2, 8, 1.5, 3, 3):
            with rope_patch.patch(model, "yarn", factor=factor):
                forward(model, tokens(TARGET))
        forward(model, tokens(TARGET))
    lengths = [message.split(" outgrew the ")[1].split()[0] for message in warnings()]
    assert lengths == [str(2 * TRAINED), str(3 * TRAINED)]


def test_silence(warnings):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=2)
    with silence_length_warnings():
        forward(model, tokens(TARGET))
    assert warnings() == []
    forward(model, tokens(TARGET))
    assert len(warnings()) == 1


def test_evaluations_are_silent(tmp_path, warnings):
    measured = {"methods": ("yarn",), "tasks": ("perplexity",), "factor": 1.5, "lengths": (448,)}
    results = evaluate(request(tmp_path, **measured))
    assert results["run"]["trained_length"] == 256  # 384 with the patch
    assert warnings() == []


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
