"""Test patched models with caches, padding, compilation, offloading, meta tensors and adapters."""

import copy
import cProfile

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_config,
    make_generator,
    make_model,
    tokens,
)

import rope_patch

LONGROPE = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
STATIC = {name: {} for name in ("linear", "ntk", "ntk-by-parts", "yarn", "llama3", "abf")}
STATIC["proportional"] = {"partial_rotary_factor": 0.25}


def generate(model, ids, new, **kwargs):
    """Return greedy tokens `[B, new]` and their logits `[new, B, vocab]`."""
    kwargs |= {"max_new_tokens": new, "do_sample": False}
    output = model.generate(ids, output_logits=True, return_dict_in_generate=True, **kwargs)
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits)


def assert_cache_changes_nothing(model, ids, new):
    cached, cached_logits = generate(model, ids, new, use_cache=True)
    uncached, uncached_logits = generate(model, ids, new, use_cache=False)
    assert cached.shape == (1, new)
    assert cached.equal(uncached)
    torch.testing.assert_close(cached_logits, uncached_logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", STATIC)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_does_not_change_generation_across_the_trained_length(family, method):
    model = make_generator(family)
    ids = tokens(TRAINED - 10)
    _, unpatched = generate(model, ids, 1)
    rope_patch.patch(model, method, factor=4, **STATIC[method])
    assert_differs(generate(model, ids, 1)[1], unpatched)
    assert_cache_changes_nothing(model, ids, 20)


@pytest.mark.parametrize("length", [SHORT, TRAINED + 10])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_does_not_change_longrope_generation(family, length):
    model = make_generator(family)
    rope_patch.patch(model, "longrope", factor=4, **LONGROPE)
    assert_cache_changes_nothing(model, tokens(length), 20)


@pytest.mark.parametrize("method", ["linear", "yarn"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_padding_does_not_change_generation(family, method):
    model = make_generator(family)
    rope_patch.patch(model, method, factor=4)
    rows = [tokens(30, seed=3), tokens(TRAINED + 16, seed=4)]
    width = rows[1].shape[1]
    pad = [width - row.shape[1] for row in rows]
    batch = torch.cat(
        [torch.nn.functional.pad(row, (n, 0)) for row, n in zip(rows, pad, strict=True)]
    )
    mask = torch.ones_like(batch)
    mask[0, : pad[0]] = 0
    generated, _ = generate(model, batch, 12, attention_mask=mask)
    for got, row in zip(generated, rows, strict=True):
        assert got.equal(generate(model, row, 12)[0][0])


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="eager", dynamic=False)


@pytest.mark.parametrize(
    ("family", "method", "options", "lengths"),
    [
        ("llama", "yarn", {}, (LONG,)),
        ("gemma3", "yarn", {}, (LONG,)),
        ("llama", "longrope", LONGROPE, (LONG, SHORT, LONG)),
        ("gemma3", "dynamic-yarn", {}, (LONG, SHORT, LONG)),
    ],
)
def test_compile_before_or_after_patch(family, method, options, lengths):
    torch._dynamo.reset()
    model, reference = make_model(family), make_model(family)
    plain = logits(reference)
    before = compiled(model)
    assert_close(logits(before), plain)

    rope_patch.patch(reference, method, factor=4, **options)
    handle = rope_patch.patch(model, method, factor=4, **options)
    for length in lengths:
        assert_close(logits(before, length), logits(reference, length))
    handle.undo()
    assert_close(logits(before), plain)

    rope_patch.patch(before, method, factor=4, **options)  # through the wrapper
    after = compiled(model)
    for length in lengths:
        assert_close(logits(after, length), logits(reference, length))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_offloaded_model_matches_the_loaded_one(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    plain = logits(model)
    rope_patch.patch(model, "yarn", factor=4)
    offloaded = rope_patch.load(
        tmp_path / "model",
        "yarn",
        factor=4,
        device_map="auto",
        max_memory={"cpu": "220KB"},  # of about 310
        offload_folder=tmp_path / "offload",
    )
    assert {"cpu", "disk"} <= {str(device) for device in offloaded.hf_device_map.values()}
    assert_close(logits(offloaded), logits(model))
    assert generate(offloaded, tokens(60), 8)[0].equal(generate(model, tokens(60), 8)[0])
    rope_patch.unpatch(offloaded)
    assert logits(offloaded).equal(plain)


@pytest.fixture(scope="module")
def llama_1b():
    """Return Llama 3.2 1B without weights."""
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_patch_of_a_1b_model_makes_few_calls(llama_1b):
    """Count calls of functions, some 90,000 or 20 ms, because times depend on the machine."""
    rope_patch.patch(llama_1b, "yarn", factor=4).undo()  # what is asked once of a class
    profile = cProfile.Profile()
    profile.runcall(rope_patch.patch, llama_1b, "yarn", factor=4).undo()
    assert 0 < sum(entry.callcount for entry in profile.getstats()) < 200_000


def test_buffers_do_not_grow_with_the_length(llama_1b):
    def buffers():
        return {name: (b.shape, b.dtype) for name, b in llama_1b.named_buffers()}

    before = buffers()
    pairs = llama_1b.config.head_dim // 2
    for method, options in [("yarn", {}), ("longrope", {"long_factor": [4.0] * pairs})]:
        handle = rope_patch.patch(llama_1b, method, length=2**24, **options)
        assert buffers() == before
        assert handle.frequencies[None].inv_freq.shape == (pairs,)
        handle.undo()
        assert buffers() == before


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_meta_model_has_exact_frequencies_after_to_empty(family):
    real = make_model(family)
    with torch.device("meta"):
        empty = make_model(family)
    rope_patch.patch(empty, "yarn", factor=4)
    rope_patch.patch(real, "yarn", factor=4)
    assert all(buffer.is_meta for buffer in empty.buffers())
    empty.to_empty(device="cpu")

    def live(model):
        named_buffers = model.model.rotary_emb.named_buffers()
        return {name: b for name, b in named_buffers if "original" not in name}

    assert live(empty).keys() == live(real).keys()
    assert all(live(empty)[name].equal(buffer) for name, buffer in live(real).items())
    rope_patch.unpatch(empty)
    rope_patch.unpatch(real)
    assert all(live(empty)[name].equal(buffer) for name, buffer in live(real).items())


def test_meta_model_loads_weights():
    real = make_model()
    with torch.device("meta"):
        empty = make_model()
    rope_patch.patch(empty, "yarn", factor=4)
    empty.to_empty(device="cpu").load_state_dict(real.state_dict())
    plain = logits(real)
    rope_patch.patch(real, "yarn", factor=4)
    assert logits(empty).equal(logits(real))
    rope_patch.unpatch(empty)
    assert logits(empty).equal(plain)


@pytest.mark.parametrize(
    ("method", "options"), [("yarn", {}), ("longrope", LONGROPE), ("dynamic-yarn", {})]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_default_device_does_not_affect_patch_and_undo(family, method, options):
    model, reference = make_model(family), make_model(family)
    plain = logits(model)
    rope_patch.patch(reference, method, factor=4, **options)
    with torch.device("meta"):
        handle = rope_patch.patch(model, method, factor=4, **options)
    for length in (SHORT, LONG):
        assert logits(model, length).equal(logits(reference, length))
    with torch.device("meta"):
        handle.undo()
    assert logits(model).equal(plain)


def test_gradients_match_the_native_model():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    native = transformers.LlamaForCausalLM(copy.deepcopy(model.config))
    native.load_state_dict(model.state_dict())
    ids = tokens(LONG)
    for each_model in (model, native):
        each_model.train()
        each_model(input_ids=ids, labels=ids).loss.backward()
    for weight, native_weight in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, native_weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("through_adapter", [True, False], ids=["adapter", "base"])
def test_patch_and_undo_with_a_lora_adapter(through_adapter):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    plain = make_model()
    torch.manual_seed(0)
    adapted = peft.get_peft_model(plain, lora).eval()
    before = logits(adapted)
    keys = list(adapted.state_dict())
    handle = rope_patch.patch(adapted if through_adapter else plain, "yarn", factor=4)
    assert rope_patch.current(adapted) is handle
    assert list(adapted.state_dict()) == keys
    assert adapted.config.max_position_embeddings == TARGET

    torch.manual_seed(0)
    config = make_config(
        rope_parameters=copy.deepcopy(adapted.config.rope_parameters),
        max_position_embeddings=TARGET,
    )
    native = peft.get_peft_model(make_model(config=config), lora).eval()
    native.load_state_dict(adapted.state_dict())
    assert_close(logits(adapted), logits(native))
    assert_differs(logits(adapted), before)
    handle.undo()
    assert logits(adapted).equal(before)
