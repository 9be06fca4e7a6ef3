"""Test generate with dynamic methods and images, against rotating all keys afresh."""

import copy
import pickle

import pytest
import torch
from helpers.mrope_reference import MRopeReference
from helpers.releases import plain_transformers, prompt_lookup
from helpers.tiny_models import BEFORE_5_17, OLD_TRANSFORMERS, assert_close, assert_differs
from helpers.vision_models import (
    IMAGE_TOKENS,
    MODEL_TYPES,
    SAMPLE,
    image_prompt,
    text_tokens,
    vision_model,
)
from torch._dynamo.utils import counters
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.patching.dynamic import hooks

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="prepares positions in other ways")

NEW = 45
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
FULL = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
ATTENTION_ONLY = [name for name in MODEL_TYPES if not name.startswith("qwen3_5")]


def generate(model, inputs, **options):
    """Return new tokens and their logits, `[S, B, V]`."""
    out = model.generate(**inputs, **{**FULL, **options})
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits), out


def truth_of(model, inputs, **options):
    reference = MRopeReference(model, "dynamic-yarn")
    return generate(reference.model, inputs, past_key_values=reference.new_cache(), **options)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_positions_continue_from_the_largest_behind_an_image(model_type, monkeypatch):
    model, inputs = vision_model(model_type), image_prompt(44, 6)
    plain_logits = generate(model, inputs)[1]
    expected, expected_logits, _ = truth_of(model, inputs)
    reads = []
    read = hooks.token_extents
    monkeypatch.setattr(hooks, "token_extents", lambda at: reads.append(at) or read(at))
    rope_patch.patch(model, "dynamic-yarn")
    ids, logits, out = generate(model, inputs)
    assert torch.equal(ids, expected)
    assert_close(logits, expected_logits)
    assert_differs(logits, plain_logits)
    # 52 tokens of text, and 24 of an image that takes 6 positions; the last token is not cached.
    assert inputs["input_ids"].shape[1] == 52 + IMAGE_TOKENS
    assert out.past_key_values.rotation.positions[0, -1].tolist() == [52 + 6 + NEW - 2] * 3
    # transformers counts positions from then on; up to 5.10 some models prepare theirs themselves.
    assert len(reads) <= (NEW - 1 if BEFORE_5_17 else 1)


def test_a_prompt_may_end_with_an_image():
    """The next tokens have three different positions, which transformers counts one by one."""
    model, inputs = vision_model(MODEL_TYPES[0]), image_prompt(40, 0)
    for name in ("input_ids", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :-1]
    expected, expected_logits, _ = truth_of(model, inputs)
    rope_patch.patch(model, "dynamic-yarn")
    ids, logits, out = generate(model, inputs)
    assert torch.equal(ids, expected)
    assert_close(logits, expected_logits)
    assert len(set(out.past_key_values.rotation.positions[0, -1].tolist())) == 3


@pytest.mark.parametrize("model_type", SAMPLE)
def test_beams_match_rotating_all_keys_afresh(model_type):
    model, inputs = vision_model(model_type), image_prompt(44, 6)
    reference = MRopeReference(model, "dynamic-yarn")
    cache = reference.new_cache()
    expected = reference.model.generate(**inputs, **GREEDY, num_beams=3, past_key_values=cache)
    rope_patch.patch(model, "dynamic-yarn")
    assert torch.equal(model.generate(**inputs, **GREEDY, num_beams=3), expected)


@pytest.mark.parametrize("model_type", ATTENTION_ONLY)
def test_assisted_decoding_gives_the_same_tokens(model_type):
    model, inputs = vision_model(model_type, spread=0.2), image_prompt(44, 6)
    expected = truth_of(model, inputs)[0]
    assert len(expected.unique()) > 5
    rope_patch.patch(model, "dynamic-yarn")
    assert torch.equal(generate(model, inputs, **prompt_lookup(4))[0], expected)
    assistant = copy.deepcopy(model)
    assert torch.equal(generate(model, inputs, assistant_model=assistant)[0], expected)


def image_and_text():
    """Return inputs of two rows, padded on the left: one with an image, one of text."""
    rows = [image_prompt(44, 6), image_prompt(44, 6)]
    ids = text_tokens(35, seed=9)
    width = rows[0]["input_ids"].shape[1]
    batch = {**rows[0], "input_ids": torch.cat([rows[0]["input_ids"], pad(ids, (width - 35, 0))])}
    batch["mm_token_type_ids"] = pad(rows[0]["mm_token_type_ids"], (0, 0, 0, 1))
    mask = torch.ones_like(batch["input_ids"])
    mask[1, : width - 35] = 0
    return [rows[0], {"input_ids": ids}], {**batch, "attention_mask": mask}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_padded_rows_generate_as_alone(model_type, cache):
    model = vision_model(model_type)
    rows, batch = image_and_text()
    with plain_transformers():
        generate(model, batch, cache_implementation=cache)
    truths = [truth_of(model, row) for row in rows]
    rope_patch.patch(model, "dynamic-yarn")
    ids, logits, _ = generate(model, batch, cache_implementation=cache)
    for index, (expected, expected_logits, _) in enumerate(truths):
        assert torch.equal(ids[index], expected[0])
        assert_close(logits[:, index], expected_logits[:, 0])


@pytest.mark.parametrize("model_type", ATTENTION_ONLY)
def test_a_second_turn_continues_the_cache(model_type):
    """transformers passes `[1, B, S]` positions there."""
    model, first = vision_model(model_type), image_prompt(10, 4)
    reference = MRopeReference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    results = []
    for each, cache in ((reference.model, reference.new_cache()), (model, None)):
        sequences, _, out = generate(each, first, max_new_tokens=30, past_key_values=cache)
        ids = torch.cat([first["input_ids"], sequences, text_tokens(8, seed=4)], dim=1)
        results.append(generate(each, {"input_ids": ids}, past_key_values=out.past_key_values))
    (expected, expected_logits, _), (ids, logits, _) = results
    assert torch.equal(ids, expected)
    assert_close(logits, expected_logits)


# -- caches ----------------------------------------------------------------------------------------


@torch.no_grad()
def run(model, steps, cache):
    return torch.cat([model(**step, past_key_values=cache).logits for step in steps], 1)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_copied_and_pickled_caches_continue(model_type):
    model = vision_model(model_type)
    steps = [{"input_ids": ids} for ids in text_tokens(60, seed=5).split(1, 1)]
    reference = MRopeReference(model, "dynamic-yarn")
    truth = reference.run([image_prompt(44, 6), *steps])
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config.get_text_config())
    run(model, [image_prompt(44, 6)], cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_close(run(model, steps, copied), truth[:, -60:])


@pytest.mark.parametrize("model_type", [name for name in SAMPLE if name in ATTENTION_ONLY])
def test_a_cropped_cache_continues(model_type):
    model, rest = vision_model(model_type), text_tokens(40, seed=5)
    prompt = image_prompt(20, 50)
    steps = [
        {"input_ids": rest[:, i : i + 1], "position_ids": torch.full((3, 1, 1), 54 + i)}
        for i in range(rest.shape[1])
    ]
    reference = MRopeReference(model, "dynamic-yarn")
    cache = reference.new_cache()
    reference.run([prompt], cache)
    cache.crop(-24)
    truth = reference.run(steps, cache)
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config.get_text_config())
    run(model, [prompt], cache)
    cache.crop(-24)
    assert_close(run(model, steps, cache), truth)


@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize("model_type", [name for name in SAMPLE if name in ATTENTION_ONLY])
def test_compiled_steps_match_rotating_all_keys_afresh(model_type):
    model = vision_model(model_type)
    steps = [{"input_ids": ids} for ids in text_tokens(50, seed=5).split(1, 1)]
    for index, step in enumerate(steps):
        step["position_ids"] = torch.full((3, 1, 1), 58 + index)
    truth = MRopeReference(model, "dynamic-yarn").run([image_prompt(44, 6), *steps])
    rope_patch.patch(model, "dynamic-yarn")
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=128)
    prompt = run(model, [image_prompt(44, 6)], cache)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(torch.cat([prompt, run(compiled, steps, cache)], 1), truth)
    assert not counters["graph_break"]


def test_positions_counted_from_a_longer_mask_are_refused():
    """transformers counts a mask that includes cached tokens as new ones."""
    model = vision_model(MODEL_TYPES[0])
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config.get_text_config())
    run(model, [image_prompt(44, 6)], cache)
    step = {"input_ids": text_tokens(1), "attention_mask": torch.ones(1, 77, dtype=torch.long)}
    with pytest.raises(ValueError, match="expected position_ids of 1 tokens, got 77"):
        run(model, [step], cache)
