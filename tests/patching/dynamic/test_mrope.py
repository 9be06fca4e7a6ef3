"""Test dynamic methods on tokens with three positions, against rotating all keys afresh."""

import pytest
import torch
from helpers.mrope_reference import MRopeReference
from helpers.reference_rerotation import exact, frequencies
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    make_model,
    step_by_step,
)
from helpers.vision_models import (
    IMAGE_TOKENS,
    MODEL_TYPES,
    SAMPLE,
    image_positions,
    image_prompt,
    next_positions,
    text_tokens,
    vision_model,
)
from torch.nn.functional import pad
from transformers import DynamicCache

import rope_patch

LONGROPE = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
METHODS = ["dynamic", "dynamic-linear", "dynamic-ntk-by-parts", "dynamic-yarn", "longrope"]
CASES = [
    *(
        (model_type, method)
        for model_type in MODEL_TYPES
        for method in ("dynamic-yarn", "longrope")
    ),
    *(("qwen3_vl", method) for method in METHODS if method not in ("dynamic-yarn", "longrope")),
]
BEFORE, AFTER = 40, 6  # tokens around the image
REST = 60  # 4 growth steps from the trained length on


class MixedReference(MRopeReference):
    """The plain rotation up to the trained length, and the whole factor beyond it."""

    def current(self, layer):
        length = (self.positions.max() - self.positions.min()).item() + 1
        if length <= TRAINED:
            return frequencies(self.config, "dynamic", 1, exact)
        return frequencies(self.config, self.method, TARGET, exact)


def options_of(method):
    return LONGROPE if method == "longrope" else {}


def with_image(rest=REST):
    """Return the forward calls of a prompt with an image, and of text token by token."""
    steps = text_tokens(rest, seed=5).split(1, 1)
    return [image_prompt(BEFORE, AFTER), *({"input_ids": step} for step in steps)]


def at_positions(cuts, rest=REST):
    """Return forward calls of random tokens at the positions of text, an image and text."""
    positions = image_positions(BEFORE, AFTER)
    positions = torch.cat([positions, next_positions(positions, rest)], dim=2)
    ids = text_tokens(positions.shape[2], seed=6)
    cuts = [*cuts, *[1] * (ids.shape[1] - sum(cuts))]
    parts = zip(ids.split(cuts, 1), positions.split(cuts, 2), strict=True)
    return [{"input_ids": part, "position_ids": at} for part, at in parts]


@torch.no_grad()
def run(model, steps, cache=None):
    cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
    return torch.cat([model(**step, past_key_values=cache).logits for step in steps], 1)


# -- decoding, against all keys rotated by the current frequencies at every step -------------------


@pytest.mark.parametrize(("model_type", "method"), CASES)
def test_decoding_after_an_image_matches_rotating_all_keys_afresh(model_type, method):
    model, steps = vision_model(model_type), with_image()
    plain = run(model, steps)
    truth = MRopeReference(model, method, options=options_of(method)).run(steps)
    rope_patch.patch(model, method, **options_of(method))
    decoded = run(model, steps)
    assert_close(decoded, truth)
    assert_differs(decoded, plain)
    rope_patch.unpatch(model)
    assert torch.equal(run(model, steps), plain)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_second_image_into_the_cache_matches_rotating_all_keys_afresh(model_type):
    model, first, second = (
        vision_model(model_type),
        image_prompt(10, 2),
        image_prompt(24, 2, seed=9),
    )
    positions = image_positions(10, 2)
    at = image_positions(24, 2) + positions.max() + 1
    rest = next_positions(at, 20).split(1, 2)
    steps = [first, {**second, "position_ids": at}]
    steps += [
        {"input_ids": ids, "position_ids": each}
        for ids, each in zip(text_tokens(20, seed=5).split(1, 1), rest, strict=True)
    ]
    truth = MRopeReference(model, "dynamic-yarn").run(steps)
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(run(model, steps), truth)


@pytest.mark.parametrize("inner", ["linear", "ntk", "yarn"])
@pytest.mark.parametrize("model_type", SAMPLE)
def test_mixed_windows_after_an_image_match_rotating_all_keys_afresh(model_type, inner):
    model, steps = vision_model(model_type), with_image()
    truth = MixedReference(model, {"ntk": "dynamic"}.get(inner, f"dynamic-{inner}")).run(steps)
    rope_patch.patch(model, f"mixed-{inner}", factor=4)
    assert_close(run(model, steps), truth)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_text_without_position_ids_matches_rotating_all_keys_afresh(model_type):
    model, ids = vision_model(model_type), text_tokens(TRAINED + REST)
    steps = [{"input_ids": part} for part in ids.split([40] + [1] * (ids.shape[1] - 40), 1)]
    truth = MRopeReference(model, "dynamic-yarn").run(steps)
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(run(model, steps), truth)
    # As position_ids of one axis, and of three and the mask's.
    at = torch.arange(ids.shape[1])[None]
    for positions in (at, at.expand(1, 1, -1), at.expand(3, 1, -1), at.expand(4, 1, -1)):
        parts = positions.split([40] + [1] * (ids.shape[1] - 40), -1)
        given = [{**s, "position_ids": p} for s, p in zip(steps, parts, strict=True)]
        assert_close(run(model, given), truth)


@pytest.mark.skipif("qwen2_vl" not in MODEL_TYPES, reason="applies sections in the attention")
def test_text_rotates_as_in_a_model_with_one_position():
    """Qwen2-VL's decoder has the weights and the rotation of Qwen2's, where a text has no image."""
    model = vision_model("qwen2_vl")
    plain = make_model("qwen2", rms_norm_eps=1e-5, tie_word_embeddings=False)
    weights = {f"model.{k}": v for k, v in model.model.language_model.state_dict().items()}
    plain.load_state_dict({**weights, "lm_head.weight": model.lm_head.weight})
    ids = text_tokens(TRAINED + REST)
    for each in (model, plain):
        rope_patch.patch(each, "dynamic-yarn", kernels="hf")
    cache = DynamicCache(config=model.config.get_text_config())
    assert_close(step_by_step(model, ids, 40, cache), step_by_step(plain, ids, 40))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_chunks_that_cut_an_image_match_rotating_all_keys_afresh(model_type):
    """Chunks end within the image, and single tokens of it have three different positions."""
    model = vision_model(model_type)
    steps = at_positions([BEFORE + 5, 1, 1, 7, 1, 12, 40, 3])
    truth = MRopeReference(model, "dynamic-yarn").run(steps)
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(run(model, steps), truth)


@pytest.mark.parametrize("chunk", [1, 5, IMAGE_TOKENS])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_largest_position_of_any_axis_counts(model_type, chunk):
    """Each row and column of the image lies beyond the trained length, which time is not."""
    model, before = vision_model(model_type), TRAINED - 2
    positions = image_positions(before, 0)[..., : before + 1 + IMAGE_TOKENS]
    assert positions[0].max() + 1 <= TRAINED < positions[1].max() + 1 < positions[2].max() + 1
    cuts = [before + 1, *[chunk] * (IMAGE_TOKENS // chunk)]
    cuts += [IMAGE_TOKENS % chunk] if IMAGE_TOKENS % chunk else []
    ids = text_tokens(before + 1 + IMAGE_TOKENS, seed=6)
    parts = zip(ids.split(cuts, 1), positions.split(cuts, 2), strict=True)
    steps = [{"input_ids": part, "position_ids": at} for part, at in parts]
    truth = MRopeReference(model, "dynamic-yarn", exact).run(steps)
    rope_patch.patch(model, "dynamic-yarn", growth="exact")
    assert_close(run(model, steps), truth)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_one_pass_has_the_frequencies_of_the_largest_position(model_type):
    model, (step,) = vision_model(model_type), at_positions([BEFORE + IMAGE_TOKENS + 2 + AFTER], 0)
    rest = {"input_ids": step["input_ids"].repeat(1, 3)}
    positions = step["position_ids"]
    rest["position_ids"] = torch.cat([positions, positions + 34, positions + 68], dim=2)
    largest = int(rest["position_ids"].max())
    assert TRAINED < largest + 1 < rest["input_ids"].shape[1]  # more tokens than positions
    truth = MRopeReference(model, "dynamic-yarn", exact).run([rest])
    handle = rope_patch.patch(model, "dynamic-yarn", growth="exact")
    assert_close(run(model, [rest]), truth)
    if not OLD_TRANSFORMERS:  # it takes an image without a cache for several documents
        with torch.no_grad():
            assert_close(model(**rest, use_cache=False).logits, truth)
    # The same as with the frequencies of that length alone.
    handle.fix_length(largest + 1)
    assert_close(run(model, [rest]), truth)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_padded_rows_decode_as_alone(model_type, side):
    """One row has an image, the other is text alone and grows at other tokens."""
    if side == "right" and model_type.startswith("qwen3_5"):
        pytest.skip("linear attention reads padding behind a prompt")
    model = vision_model(model_type)
    image, text = at_positions([52], 0)[0], text_tokens(44, seed=7)
    rows = [image, {"input_ids": text, "position_ids": torch.arange(44).expand(3, 1, -1)}]
    width, rest = 52, text_tokens(REST, seed=8)
    truths = []
    for row in rows:
        more = next_positions(row["position_ids"], REST)
        parts = zip(rest.split(1, 1), more.split(1, 2), strict=True)
        steps = [{"input_ids": ids, "position_ids": at} for ids, at in parts]
        truths.append(MRopeReference(model, "dynamic-yarn").run([row, *steps])[:, -REST:])

    def batch(name, dim):
        short = [width - row["input_ids"].shape[1] for row in rows]
        ends = [(pads, 0) if side == "left" else (0, pads) for pads in short]
        return torch.cat([pad(r[name], e) for r, e in zip(rows, ends, strict=True)], dim)

    ids, at = batch("input_ids", 0), batch("position_ids", 1)
    mask = (ids > 0).long()
    steps = [{"input_ids": ids, "position_ids": at, "attention_mask": mask}]
    starts = torch.tensor([int(row["position_ids"].max()) + 1 for row in rows])
    for index in range(REST):
        mask = pad(mask, (0, 1), value=1)
        step = {"input_ids": rest[:, index : index + 1].expand(2, -1), "attention_mask": mask}
        steps.append({**step, "position_ids": (starts + index).expand(3, -1)[..., None]})
    rope_patch.patch(model, "dynamic-yarn")
    decoded = run(model, steps)[:, -REST:]
    for row, truth in zip(decoded, truths, strict=True):
        assert_close(row[None], truth)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_rotary_module_alone_follows_the_largest_position(model_type):
    model = vision_model(model_type)
    rope_patch.patch(model, "dynamic-yarn", growth="exact")
    rotary = model.model.language_model.rotary_emb
    positions = image_positions(TRAINED - 2, 0)
    cos, sin = rotary(torch.zeros(1, 1, 4), positions)
    reference = MRopeReference(model, "dynamic-yarn", exact)
    reference.positions = positions
    inv_freq, scale = reference.current(0)
    angle = (positions[reference.axes, 0] * inv_freq[:, None]).T.repeat(1, 2)
    torch.testing.assert_close(cos[0], angle.cos() * scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0], angle.sin() * scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_growth_at_admission_is_refused(model_type):
    """An image has fewer positions than tokens, so a request's tokens say no length."""
    model = vision_model(model_type)
    with pytest.raises(ValueError, match="use growth='stepped'"):
        rope_patch.patch(model, "dynamic-yarn", growth="admission")
    assert rope_patch.current(model) is None
