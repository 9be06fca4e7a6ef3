"""Test mixed windows: each row has the unpatched or the inner method's rotation, by its length.

tests/patching/test_every_patch.py saves, loads and undoes them.
"""

import json

import pytest
import torch
import transformers
from helpers.growing_texts import END, PROMPT
from helpers.reference_rerotation import Reference, exact, frequencies
from helpers.releases import plain_transformers
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    logits,
    make_config,
    make_model,
    padded,
    step_by_step,
    tokens,
)

import rope_patch

INNER = {
    "linear": {},
    "ntk": {},
    "ntk-by-parts": {"beta_fast": 4},
    "yarn": {"beta_fast": 4},
    "abf": {},
    "longrope": {"long_factor": LONG_FACTOR},
}
NATIVE = {
    "linear": {},
    "yarn": {"attention_factor": 1.0},
    "longrope": {"long_factor": LONG_FACTOR, "attention_factor": 1.0},
}
SHAPES = ["llama", "qwen3", "gemma3"]
KERNELS = ["auto", "reference", "hf"]
LENGTHS = (30, TRAINED, TRAINED + 1, 200)


def models(family, inner, **options):
    """Return the unpatched model, one with the inner method, and one with mixed windows."""
    plain, static, mixed = (make_model(family) for _ in range(3))
    rope_patch.patch(static, inner, factor=4, **options)
    rope_patch.patch(mixed, f"mixed-{inner}", factor=4, **options)
    return plain, static, mixed


def sidecar(folder):
    return json.loads((folder / "rope_patch.json").read_text())


# -- single rows and batches -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "inner"),
    [*(("llama", inner) for inner in INNER), *((family, "yarn") for family in SHAPES[1:])],
)
def test_short_rows_match_the_plain_model_and_long_ones_the_inner_method(family, inner):
    plain, static, mixed = models(family, inner, **INNER[inner])
    for length in (SHORT, TRAINED):
        assert logits(mixed, length).equal(logits(plain, length))
        assert_differs(logits(static, length), logits(plain, length))
    for length in (TRAINED + 1, LONG, TARGET + 10):
        assert_close(logits(mixed, length), logits(static, length))


@pytest.mark.parametrize(
    ("inner", "side", "kernels"),
    [
        *(("yarn", side, kernels) for side in ("left", "right") for kernels in KERNELS),
        ("ntk", "left", "auto"),
    ],
)
def test_rows_of_a_padded_batch_rotate_by_their_length(inner, side, kernels):
    plain, static, mixed = models("llama", inner, **INNER[inner], kernels=kernels)
    rows = [tokens(length, seed=length) for length in LENGTHS]
    ids, mask = padded(rows, side)
    batch = forward(mixed, ids, attention_mask=mask)
    for row, got, slots in zip(rows, batch, mask.bool(), strict=True):
        single = forward(plain if row.shape[1] <= TRAINED else static, row)[0]
        assert_close(got[slots], single)


@pytest.mark.parametrize("family", SHAPES)
def test_packed_rows_rotate_by_their_longest_document(family):
    """Pack rows of 160 tokens, with short documents only or with a long one."""
    plain, static, mixed = models(family, "yarn", **INNER["yarn"])
    packed = [(TRAINED, 50, 40, 6), (100, 50, 10), (10, 50, 100), (40, 40, 40, 40)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in packed])
    ids = tokens(160, batch=len(packed))
    got, short, long = (forward(m, ids, position_ids=positions) for m in (mixed, plain, static))
    for i, documents in enumerate(packed):
        is_short = max(documents) <= TRAINED
        assert_close(got[i], (short if is_short else long)[i])
        assert_differs(got[i], (long if is_short else short)[i])
        if is_short:
            row, row_positions = ids[i : i + 1], positions[i : i + 1]
            single = forward(mixed, row, position_ids=row_positions)
            assert single.equal(forward(plain, row, position_ids=row_positions))


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradients_of_a_batch_are_the_sum_of_both_models(kernels):
    """Train on a short and a long row at once."""
    plain, static, mixed = models("llama", "yarn", **INNER["yarn"], kernels=kernels)
    rows = [tokens(SHORT, seed=3), tokens(LONG, seed=4)]
    ids, mask = padded(rows, "right")
    mixed(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()
    for model, row in zip((plain, static), rows, strict=True):
        model(row).logits.square().sum().backward()
    for (name, weight), a, b in zip(
        mixed.named_parameters(), plain.parameters(), static.parameters(), strict=True
    ):
        assert weight.grad.abs().sum() > 0, name
        expected = a.grad + b.grad
        torch.testing.assert_close(
            weight.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()
        )


# -- decoding --------------------------------------------------------------------------------------


class MixedReference(Reference):
    """The plain rotation up to the trained length, and the whole factor beyond it."""

    def current(self, layer):
        kind = self.kinds[layer]
        length = (self.positions.max() - self.positions.min()).item() + 1
        if length <= TRAINED or (kind is not None and "sliding" in kind):
            return frequencies(self.config, "dynamic", 1, exact, kind)
        return frequencies(self.config, self.method, TARGET, exact, kind, self.options)


@pytest.mark.parametrize(
    ("family", "inner", "kernels"),
    [
        *(("llama", inner, "auto") for inner in INNER if inner != "abf"),
        ("gemma3", "yarn", "auto"),
        pytest.param("qwen3", "yarn", "auto", marks=pytest.mark.slow),
        *(("llama", "yarn", kernels) for kernels in KERNELS[1:]),
    ],
)
def test_decoding_past_the_trained_length_matches_rotating_all_keys_afresh(family, inner, kernels):
    reference_method = {"ntk": "dynamic", "longrope": "longrope"}.get(inner, f"dynamic-{inner}")
    options = {"factor": 4, "long_factor": LONG_FACTOR} if inner == "longrope" else {}
    model, ids = make_model(family), tokens(END)
    truth = MixedReference(model, reference_method, options=options).decode(ids, PROMPT)
    rope_patch.patch(model, f"mixed-{inner}", **{"factor": 4, **options}, kernels=kernels)
    assert_close(step_by_step(model, ids, PROMPT), truth)


# -- requests and configs --------------------------------------------------------------------------


def test_exactly_one_of_factor_and_length_is_required():
    model = make_model()
    with pytest.raises(ValueError, match="would change nothing"):
        rope_patch.patch(model, "mixed-yarn", factor=1)
    for options in ({}, {"factor": 4, "length": TARGET}):
        with pytest.raises(ValueError, match="factor and length"):
            rope_patch.patch(model, "mixed-yarn", **options)
    by_length = rope_patch.patch(model, "mixed-yarn", length=TARGET)
    assert (by_length.length, by_length.method.factor) == (TARGET, 4)
    assert by_length.summary().startswith("mixed-yarn ×4, 64 → 256 tokens")


def test_config_length_is_what_plain_transformers_can_read():
    """With an attention factor, the config holds the short rotation and the trained length."""
    model = make_model()
    rope_patch.patch(model, "mixed-yarn", factor=4)
    assert model.config.rope_parameters == make_config().rope_parameters
    assert model.config.max_position_embeddings == TRAINED
    rope_patch.patch(model, "mixed-yarn", factor=4, attention_factor=1.0)
    assert model.config.rope_parameters["rope_type"] == "longrope"
    assert model.config.max_position_embeddings == TARGET


@pytest.mark.parametrize(
    ("family", "inner"),
    [("llama", "linear"), ("llama", "yarn"), ("llama", "longrope"), ("gemma3", "yarn")],
)
def test_plain_transformers_loads_methods_without_an_attention_factor(family, inner, tmp_path):
    if OLD_TRANSFORMERS and family == "gemma3":
        pytest.skip("it does not switch nested scalings")
    plain, static, mixed = models(family, inner, **NATIVE[inner])
    rope_patch.save(mixed, tmp_path)
    assert sidecar(tmp_path)["native"] is True
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert rope_patch.current(native) is None
    assert native.config.max_position_embeddings == TARGET
    with plain_transformers():  # up to 5.17, a second long forward fails over layer types
        assert logits(native).equal(logits(native))
    for length in (LONG, SHORT, TRAINED, TRAINED + 1):
        assert_close(logits(native, length), logits(mixed, length))
        assert_close(logits(native, length), logits(plain if length <= TRAINED else static, length))
