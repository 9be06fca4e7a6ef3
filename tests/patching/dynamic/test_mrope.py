"""Test dynamic methods on tokens with three positions, against rotating all keys afresh."""

import copy
import pickle

import pytest
import torch
from helpers.growing_texts import LONGROPE, PROMPT, position_reads
from helpers.mrope_reference import MRopeReference
from helpers.reference_rerotation import exact, frequencies
from helpers.releases import plain_transformers, prompt_lookup
from helpers.tiny_models import (
    BEFORE_5_17,
    OLD_TRANSFORMERS,
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
from torch._dynamo.utils import counters
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache

import rope_patch

ATTENTION_ONLY = [name for name in SAMPLE if not name.startswith("qwen3_5")]
prepares_positions = pytest.mark.skipif(
    OLD_TRANSFORMERS, reason="transformers 5.0 prepares positions in other ways"
)


def cases(quick, slow=()):
    """Return parameters of which the first is an architecture that this release has."""
    marked = [*((case, ()) for case in quick), *((case, pytest.mark.slow) for case in slow)]
    return [pytest.param(*case, marks=m) for case, m in marked if case[0] in MODEL_TYPES]


def models(*quick, of=MODEL_TYPES):
    """Parametrize by architectures, of which those that differ in nothing tested here are slow."""
    slow = [(name,) for name in of if name not in quick]
    return pytest.mark.parametrize("model_type", cases([(name,) for name in quick], slow))


BEFORE, AFTER = 46, 6  # tokens around the image
REST = 20  # from 60 positions over the trained length and a growth step


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


@pytest.mark.parametrize(
    ("model_type", "method"),
    cases(
        [
            *((model_type, "dynamic-yarn") for model_type in SAMPLE),
            ("qwen3_vl", "longrope"),
            ("qwen3_vl", "dynamic"),
        ],
        [
            *((name, "dynamic-yarn") for name in MODEL_TYPES if name not in SAMPLE),
            ("qwen2_vl", "longrope"),
            ("qwen3_5", "longrope"),
            ("qwen3_vl", "dynamic-linear"),
            ("qwen3_vl", "dynamic-ntk-by-parts"),
        ],
    ),
)
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


@models("qwen3_vl", of=SAMPLE)
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


@pytest.mark.parametrize(
    ("model_type", "inner"),
    cases(
        [("qwen2_vl", "yarn"), ("qwen3_vl", "yarn")],
        [("qwen3_5", "yarn"), ("qwen3_vl", "linear"), ("qwen3_vl", "ntk")],
    ),
)
def test_mixed_windows_after_an_image_match_rotating_all_keys_afresh(model_type, inner):
    model, steps = vision_model(model_type), with_image()
    truth = MixedReference(model, {"ntk": "dynamic"}.get(inner, f"dynamic-{inner}")).run(steps)
    rope_patch.patch(model, f"mixed-{inner}", factor=4)
    assert_close(run(model, steps), truth)


@models(*SAMPLE)
def test_text_without_position_ids_matches_rotating_all_keys_afresh(model_type):
    model, ids = vision_model(model_type), text_tokens(TRAINED + REST)
    cuts = [PROMPT] + [1] * (ids.shape[1] - PROMPT)
    steps = [{"input_ids": part} for part in ids.split(cuts, 1)]
    truth = MRopeReference(model, "dynamic-yarn").run(steps)
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(run(model, steps), truth)
    if model_type not in SAMPLE:
        return
    # As position_ids of one axis, and of three and the mask's, over the trained length.
    end = TRAINED + 4
    at = torch.arange(end)[None]
    for positions in (at, at.expand(1, 1, -1), at.expand(3, 1, -1), at.expand(4, 1, -1)):
        parts = positions.split(cuts[: end - PROMPT + 1], -1)
        given = [{**s, "position_ids": p} for s, p in zip(steps, parts, strict=False)]
        assert_close(run(model, given), truth[:, :end])


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
    assert_close(step_by_step(model, ids, PROMPT, cache), step_by_step(plain, ids, PROMPT))


@models("qwen2_vl", "qwen3_vl", of=SAMPLE)
def test_chunks_that_cut_an_image_match_rotating_all_keys_afresh(model_type):
    """Chunks end within the image, and single tokens of it have three different positions."""
    model = vision_model(model_type)
    steps = at_positions([BEFORE + 5, 1, 1, 7, 1, 12, 20, 3])
    truth = MRopeReference(model, "dynamic-yarn").run(steps)
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(run(model, steps), truth)


@pytest.mark.parametrize(
    ("model_type", "chunk"),
    [
        *(("qwen3_vl", chunk) for chunk in (1, 5, IMAGE_TOKENS)),
        *((name, 5) for name in SAMPLE if name != "qwen3_vl"),
    ],
)
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


@models(*SAMPLE)
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


@pytest.mark.parametrize(
    ("model_type", "side"),  # linear attention reads padding behind a prompt
    cases(
        [("qwen3_vl", "left"), ("qwen3_vl", "right"), ("qwen3_5", "left")],
        [("qwen2_vl", "left"), ("qwen2_vl", "right")],
    ),
)
def test_padded_rows_decode_as_alone(model_type, side):
    """One row has an image, the other is text alone and grows at other tokens."""
    model = vision_model(model_type)
    image, text = at_positions([58], 0)[0], text_tokens(52, seed=7)
    rows = [image, {"input_ids": text, "position_ids": torch.arange(52).expand(3, 1, -1)}]
    width, rest = 58, text_tokens(REST, seed=8)
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
    with pytest.raises(ValueError, match="stepped"):
        rope_patch.patch(model, "dynamic-yarn", growth="admission")
    assert rope_patch.current(model) is None


# -- caches ----------------------------------------------------------------------------------------


@prepares_positions
@models("qwen3_5", of=SAMPLE)
def test_copied_and_pickled_caches_continue(model_type):
    model = vision_model(model_type)
    steps = [{"input_ids": ids} for ids in text_tokens(20, seed=5).split(1, 1)]
    reference = MRopeReference(model, "dynamic-yarn")
    truth = reference.run([image_prompt(44, 6), *steps])
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config.get_text_config())
    run(model, [image_prompt(44, 6)], cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_close(run(model, steps, copied), truth[:, -20:])


@prepares_positions
@models("qwen3_vl", of=ATTENTION_ONLY)
def test_a_cropped_cache_continues(model_type):
    model, rest = vision_model(model_type), text_tokens(24, seed=5)
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


@prepares_positions
@pytest.mark.usefixtures("reset_compiler")
@models("qwen2_vl", of=ATTENTION_ONLY)
def test_compiled_steps_match_rotating_all_keys_afresh(model_type):
    model = vision_model(model_type, num_hidden_layers=1)
    steps = [{"input_ids": ids} for ids in text_tokens(20, seed=5).split(1, 1)]
    for index, step in enumerate(steps):
        step["position_ids"] = torch.full((3, 1, 1), 58 + index)
    truth = MRopeReference(model, "dynamic-yarn").run([image_prompt(44, 6), *steps])
    rope_patch.patch(model, "dynamic-yarn")
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=128)
    prompt = run(model, [image_prompt(44, 6)], cache)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(torch.cat([prompt, run(compiled, steps, cache)], 1), truth)
    assert not counters["graph_break"]


# -- generate --------------------------------------------------------------------------------------

NEW = 20  # from 58 positions over the trained length and a growth step
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
FULL = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}


def generate(model, inputs, **options):
    """Return new tokens and their logits, `[S, B, V]`."""
    out = model.generate(**inputs, **{**FULL, **options})
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits), out


def truth_of(model, inputs, **options):
    reference = MRopeReference(model, "dynamic-yarn")
    return generate(reference.model, inputs, past_key_values=reference.new_cache(), **options)


@prepares_positions
@models(*SAMPLE)
def test_positions_continue_from_the_largest_behind_an_image(model_type):
    model, inputs = vision_model(model_type), image_prompt(44, 6)
    with position_reads() as own_reads:
        plain_logits = generate(model, inputs)[1]
    expected, expected_logits, _ = truth_of(model, inputs)
    rope_patch.patch(model, "dynamic-yarn")
    with position_reads() as reads:
        ids, logits, out = generate(model, inputs)
    assert torch.equal(ids, expected)
    assert_close(logits, expected_logits)
    assert_differs(logits, plain_logits)
    # 52 tokens of text, and 24 of an image that takes 6 positions; the last token is not cached.
    assert inputs["input_ids"].shape[1] == 52 + IMAGE_TOKENS
    assert out.past_key_values.rotation.positions[0, -1].tolist() == [52 + 6 + NEW - 2] * 3
    # transformers counts positions from then on; up to 5.10 some models prepare theirs themselves.
    more = reads.count((1, 3)) - own_reads.count((1, 3))  # of a token on three axes
    assert more <= (NEW - 1 if BEFORE_5_17 else 1)


@prepares_positions
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


@prepares_positions
@models("qwen3_5", of=SAMPLE)
def test_beams_match_rotating_all_keys_afresh(model_type):
    model, inputs = vision_model(model_type), image_prompt(44, 6)
    reference = MRopeReference(model, "dynamic-yarn")
    cache = reference.new_cache()
    expected = reference.model.generate(**inputs, **GREEDY, num_beams=3, past_key_values=cache)
    rope_patch.patch(model, "dynamic-yarn")
    assert torch.equal(model.generate(**inputs, **GREEDY, num_beams=3), expected)


@prepares_positions
@models("qwen3_vl", of=ATTENTION_ONLY)
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
    ids = text_tokens(48, seed=9)
    width = rows[0]["input_ids"].shape[1]
    batch = {**rows[0], "input_ids": torch.cat([rows[0]["input_ids"], pad(ids, (width - 48, 0))])}
    batch["mm_token_type_ids"] = pad(rows[0]["mm_token_type_ids"], (0, 0, 0, 1))
    mask = torch.ones_like(batch["input_ids"])
    mask[1, : width - 48] = 0
    return [rows[0], {"input_ids": ids}], {**batch, "attention_mask": mask}


@prepares_positions
@pytest.mark.parametrize(
    ("model_type", "cache"),
    cases(
        [("qwen3_5", "dynamic"), ("qwen3_vl", "static")],
        [
            ("qwen2_vl", "dynamic"),
            ("qwen2_vl", "static"),
            ("qwen3_vl", "dynamic"),
            ("qwen3_5", "static"),
        ],
    ),
)
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


@prepares_positions
@models("qwen3_vl", of=ATTENTION_ONLY)
def test_a_second_turn_continues_the_cache(model_type):
    """transformers passes `[1, B, S]` positions there."""
    model, first = vision_model(model_type), image_prompt(10, 4)
    reference = MRopeReference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    results = []
    for each, cache in ((reference.model, reference.new_cache()), (model, None)):
        sequences, _, out = generate(each, first, max_new_tokens=20, past_key_values=cache)
        ids = torch.cat([first["input_ids"], sequences, text_tokens(8, seed=4)], dim=1)
        results.append(generate(each, {"input_ids": ids}, past_key_values=out.past_key_values))
    (expected, expected_logits, _), (ids, logits, _) = results
    assert torch.equal(ids, expected)
    assert_close(logits, expected_logits)


@prepares_positions
def test_positions_counted_from_a_longer_mask_are_refused():
    """transformers counts a mask that includes cached tokens as new ones."""
    model = vision_model(MODEL_TYPES[0])
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config.get_text_config())
    run(model, [image_prompt(44, 6)], cache)
    step = {"input_ids": text_tokens(1), "attention_mask": torch.ones(1, 77, dtype=torch.long)}
    with pytest.raises(ValueError, match="position_ids of 1 tokens, got 77"):
        run(model, [step], cache)
