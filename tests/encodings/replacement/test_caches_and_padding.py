"""Encodings under caches, padding, windows, half precision and checkpointing."""

import pytest
import torch
from helpers.encoded_models import NAMES, ONE_EACH, encoded, llama, logits, tokens
from helpers.no_copies import NoCopies
from helpers.tiny_models import OLD_TRANSFORMERS
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.encodings import Slots, biased_mask

BIASES = ["alibi", "fire", "kerple", "sandwich", "t5"]
# Tables and biases that are computed of the same positions as others.
ALIKE = ("integer", "normalised", "binary", "kerple", "sandwich")
CLOSE = {"rtol": 0, "atol": 2e-5}
STEP = 3e-3  # Llama normalizes in float32, so smaller steps drown in rounding


def names():
    """Parametrize by encodings, of which those that are alike are slow."""
    params = [pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in NAMES]
    return pytest.mark.parametrize("name", params)


def one_each():
    """Parametrize as `names` does, with the options that change configs."""
    params = [
        pytest.param(name, options, marks=pytest.mark.slow if name in ALIKE else (), id=name)
        for name, options in ONE_EACH
    ]
    return pytest.mark.parametrize(("name", "options"), params)


def left_padded(ids, count=4):
    """Return two rows with padding before them, and their mask."""
    padded = torch.nn.functional.pad(ids, (count, 0))
    return padded, (padded > 0).long()


def caches(model):
    return DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)


def in_chunks(model, ids, cache, sizes=(5, 3), **arguments):
    """Return logits of two chunks of a prompt and of one token after the other."""
    rest = [1] * (ids.shape[1] - sum(sizes))
    parts, seen = [], 0
    for part in ids.split([*sizes, *rest], dim=1):
        seen += part.shape[1]
        own = {k: v[:, :seen] for k, v in arguments.items()}
        parts.append(logits(model, part, past_key_values=cache, use_cache=True, **own))
    return torch.cat(parts, 1)


@one_each()
def test_cached_steps_equal_one_pass(name, options):
    model = encoded(name, options)
    ids = tokens()
    expected = logits(model, ids)
    for cache in caches(model):
        torch.testing.assert_close(in_chunks(model, ids, cache), expected, **CLOSE)
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    torch.testing.assert_close(in_chunks(model, ids, cache), expected, **CLOSE)


@names()
def test_windows_see_the_same_under_all_caches(name):
    """Mistral's layers keep six keys, so caches move their first key along."""
    model = encoded(name, {}, llama("Mistral", sliding_window=6))
    ids = tokens()
    expected = logits(model, ids)
    assert (
        expected - logits(encoded(name, {}, llama("Mistral", sliding_window=None)), ids)
    ).abs().max() > 1e-3
    for cache in caches(model):
        torch.testing.assert_close(in_chunks(model, ids, cache), expected, **CLOSE)


@pytest.mark.parametrize("window", [None, 6])
def test_slots_end_at_or_behind_the_text(window):
    """A learned table on a GPU is checked by this number instead of by positions."""
    model = llama("Mistral", sliding_window=window)
    attention, hidden = model.model.layers[0].self_attn, torch.zeros(2, 1, 32)
    for cache in caches(model):
        for read in range(1, 12):
            logits(model, tokens(count=1), past_key_values=cache, use_cache=True)
            end = Slots.of(attention, hidden, {"past_key_values": cache}).end
            assert end is not None
            assert read + 1 <= end <= 20
            if isinstance(cache, DynamicCache):
                assert end == read + 1
    assert Slots.of(attention, hidden, {}).end == 1


@pytest.mark.parametrize(("implementation", "side"), [("sdpa", "left"), ("eager", "right")])
@one_each()
def test_padding_changes_no_token(name, options, implementation, side):
    model = encoded(name, options)
    model.set_attn_implementation(implementation)
    ids = tokens(count=9)
    pads = torch.zeros(2, 4, dtype=torch.long)
    padded = torch.cat([pads, ids] if side == "left" else [ids, pads], 1)
    mask = (padded > 0).long()
    got = logits(model, padded, attention_mask=mask)
    real = got[:, 4:] if side == "left" else got[:, :9]
    torch.testing.assert_close(real, logits(model, ids), **CLOSE)


@one_each()
def test_left_padded_rows_in_a_cache(name, options):
    model = encoded(name, options)
    ids = tokens()
    padded, mask = left_padded(ids, 2)
    # Transformers 5.0 itself is wrong about such rows in a static cache.
    for cache in caches(model)[: 1 if OLD_TRANSFORMERS else 2]:
        got = in_chunks(model, padded, cache, attention_mask=mask)[:, 2:]
        torch.testing.assert_close(got, logits(model, ids), **CLOSE)


@names()
def test_generate_continues_as_one_pass_would(name):
    model = encoded(name, {}, max_position_embeddings=32)
    ids = tokens()
    padded, mask = left_padded(ids, 2)
    got = model.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
    text = ids
    for _ in range(5):
        text = torch.cat([text, logits(model, text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(got[:, 2:], text)


@pytest.mark.parametrize(
    ("dtype", "implementation"), [(torch.bfloat16, "sdpa"), (torch.float16, "eager")]
)
@names()
def test_half_precision_is_finite_and_close(name, implementation, dtype):
    model = encoded(name, {})
    padded, mask = left_padded(tokens(count=9))
    expected = logits(model, padded, attention_mask=mask)
    model.to(dtype).set_attn_implementation(implementation)
    got = logits(model, padded, attention_mask=mask)
    assert got.isfinite().all()
    gap = (got.float() - expected)[:, 4:].abs().max()
    assert gap < (0.5 if dtype == torch.bfloat16 else 0.06), gap


def test_masks_stop_at_the_lowest_number():
    """finfo.min minus a slope is -inf in float16, and a row of -inf is NaN after softmax."""
    lowest = torch.finfo(torch.float16).min
    mask = torch.full((1, 1, 1, 3), lowest, dtype=torch.float16)
    bias = torch.tensor([-1e5, -20.0, 0.0]).view(1, 1, 1, 3)
    assert biased_mask(mask, bias, torch.float16).tolist() == [[[[lowest] * 3]]]
    truths = torch.tensor([True, True, False])
    got = biased_mask(truths, bias, torch.float16).flatten().tolist()
    assert got == [lowest, -20.0, lowest]


def test_autocast_masks_in_its_own_dtype():
    model = encoded("alibi", {})
    padded, mask = left_padded(tokens(count=9))
    expected = logits(model, padded, attention_mask=mask)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            got = logits(model, padded, attention_mask=mask)
        assert got.isfinite().all()
        assert (got.float() - expected)[:, 4:].abs().max() < 0.5


def loss_of(model, ids):
    """Return the loss in the model's dtype; transformers' own is in float32."""
    return torch.nn.functional.cross_entropy(
        model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )


def gradients(model, ids):
    model.zero_grad()
    loss_of(model, ids).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *(
            pytest.param(name, "sdpa", marks=pytest.mark.slow if name in ALIKE else ())
            for name in NAMES
        ),
        *((name, "eager") for name in ("fire", "t5")),
    ],
)
def test_trained_parts_get_the_slope_of_the_loss(name, implementation):
    """Central differences, along each trained part's own gradient."""
    model = encoded(name, {}).double()
    model.set_attn_implementation(implementation)
    ids = tokens()
    found = gradients(model, ids)
    assert not [key for key, gradient in found.items() if gradient is None]
    for key, parameter in model.model.position_encoding.named_parameters():
        gradient = found[f"model.position_encoding.{key}"]
        step = gradient / gradient.norm() * STEP
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step)
                losses.append(loss_of(model, ids))
                parameter.sub_(sign * step)
        slope = (losses[0] - losses[1]) / (2 * STEP)
        torch.testing.assert_close(slope, gradient.norm(), rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize("name", ["t5", "fire", "kerple", "learned", "sinusoidal", "xpos"])
def test_checkpointed_layers_give_the_same_gradients(name):
    model = encoded(name, {}).train()
    ids = tokens()
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for key, gradient in gradients(model, ids).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", BIASES)
def test_layers_of_one_forward_share_a_bias(name):
    model, calls = encoded(name, {}), []
    model.model.position_encoding.register_forward_hook(lambda *_: calls.append(1))
    logits(model, tokens())
    assert len(calls) == 1
    logits(model, tokens())
    assert len(calls) == 2  # and forgets it


@pytest.mark.slow  # Inductor compiles a kernel for each shape
@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize("name", [*BIASES, "none", "learned", "xpos"])
def test_flex_attention_equals_sdpa(name):
    # Inductor's kernel for CPUs does not compile with a bias of variable length (torch 2.13).
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        model = encoded(name, {}, hidden_size=64, head_dim=16)
        padded, mask = left_padded(tokens(count=9))
        expected = logits(model, padded, attention_mask=mask)
        model.set_attn_implementation("flex_attention")
        got = logits(model, padded, attention_mask=mask)
        torch.testing.assert_close(got[:, 4:], expected[:, 4:], rtol=0, atol=1e-4)
        cache = DynamicCache(config=model.config)
        got = in_chunks(model, padded, cache, sizes=(12,), attention_mask=mask)
        torch.testing.assert_close(got[:, 4:], expected[:, 4:], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "flash_attention_2") for name in BIASES), ("alibi", "paged|sdpa")],
)
def test_kernels_without_biases_are_refused(name, implementation):
    model = llama()
    model.config._attn_implementation = implementation
    with pytest.raises(rope_patch.Refused, match="no bias"):
        rope_patch.encode(model, name)
    model.config._attn_implementation = "sdpa"
    encoded(name, {}, model)
    model.config._attn_implementation = implementation
    with pytest.raises(rope_patch.Refused, match="no bias"):
        logits(model, tokens())


EXTENDED = [
    *[
        pytest.param(name, options, None, {}, marks=pytest.mark.slow if name in ALIKE else ())
        for name, options in ONE_EACH
    ],
    ("alibi", {}, "ntk", {"factor": 4}),
    ("alibi", {}, "dynamic-ntk", {}),
    pytest.param("alibi", {}, "dynamic-linear", {}, marks=pytest.mark.slow),
    pytest.param("t5", {"buckets": 8}, "log-tail", {"factor": 4}, marks=pytest.mark.slow),
    ("t5", {"buckets": 8}, "dynamic-log-tail", {}),
    pytest.param("t5", {"buckets": 8}, "dynamic-linear", {}, marks=pytest.mark.slow),
    ("learned", {}, "linear", {"factor": 4}),
    ("sinusoidal", {}, "ntk", {"factor": 4}),
]


def extended(name, options, method, arguments, **changes):
    model = encoded(name, options, **changes)
    if method is not None:
        rope_patch.patch(model, method, **arguments)
    return model


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="models themselves fail on this device")
@pytest.mark.parametrize(("name", "options", "method", "arguments"), EXTENDED)
def test_no_step_waits_for_the_device(name, options, method, arguments):
    model = extended(name, options, method, arguments, num_hidden_layers=2).to("meta")
    ids = torch.zeros(2, 3, dtype=torch.long, device="meta")
    logits(model, ids)  # what a device keeps from the first forward on
    cache = DynamicCache(config=model.config)
    with NoCopies():
        for part in (ids, ids[:, :1], ids[:, :1]):
            logits(model, part, past_key_values=cache, use_cache=True)


@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize(
    ("name", "method", "is_step"),
    [
        ("learned", None, True),
        ("alibi", "dynamic-ntk", True),
        ("t5", "dynamic-log-tail", False),
        pytest.param("learned", None, False, marks=pytest.mark.slow),
        pytest.param("sandwich", None, True, marks=pytest.mark.slow),
        pytest.param("sandwich", None, False, marks=pytest.mark.slow),
        pytest.param("alibi", "dynamic-ntk", False, marks=pytest.mark.slow),
        pytest.param("t5", "dynamic-log-tail", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_graphs_stay_whole(name, method, is_step):
    """Compile a prompt, or the step that follows one."""
    options = {"buckets": 8} if name == "t5" else {}
    layers = 2 if name == "alibi" else 1  # of which two share a bias
    model = extended(name, options, method, {}, num_hidden_layers=layers)
    ids, caches = tokens(), [DynamicCache(config=model.config) for _ in range(2)]
    if is_step:
        for cache in caches:
            logits(model, ids[:, :-1], past_key_values=cache)
        ids = ids[:, -1:]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected, got = (
        logits(each, ids, past_key_values=cache)
        for each, cache in zip((model, compiled), caches, strict=True)
    )
    torch.testing.assert_close(got, expected, **CLOSE)
