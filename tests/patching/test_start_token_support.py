"""Test start tokens under compilation, undo, copies and saving, and the refusals."""

import copy
import json
import math
import pickle

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    make_config,
    make_model,
    padded,
    tokens,
)
from start_token_models import OPTIONS, START, one_layer, patched, rotary_of
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache

import rope_patch
from rope_patch.patching.kernels.attention_forward import PatchedAttentionForward
from rope_patch.patching.kernels.position_passthrough import PositionPassthrough
from rope_patch.patching.start_tokens import StartTokenRotary


@pytest.mark.parametrize("equal_sets", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.usefixtures("reset_compiler")
def test_compiled_forward_is_one_graph(equal_sets):
    """Compile with one set of frequencies, and with a short and a long set."""
    short = LONG_FACTOR if equal_sets else SHORT_FACTOR
    model = patched(make_model(num_hidden_layers=1), short_factor=short)
    compiled = torch.compile(model, fullgraph=True, backend="eager" if equal_sets else "aot_eager")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    assert_close(forward(compiled, ids), forward(model, ids))
    expected = forward(model, ids, attention_mask=mask)
    assert_close(forward(compiled, ids, attention_mask=mask), expected)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("reset_compiler")
def test_compiled_decode_steps_match_a_full_forward():
    model, ids = patched(one_layer()), tokens(TRAINED + 8)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, : TRAINED - 4], past_key_values=cache)
        for i in range(TRAINED - 4, ids.shape[1]):
            position_ids = torch.tensor([[i]])
            got = step(ids[:, i : i + 1], position_ids=position_ids, past_key_values=cache).logits
    assert_close(got[:, -1], forward(model, ids)[:, -1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_undo_is_bit_exact(family):
    model, ids = make_model(family), tokens(LONG)
    expected, state = forward(model, ids), [dict(vars(m)) for m in model.modules()]
    handle = rope_patch.patch(model, "longrope", start_tokens=START, **OPTIONS)
    assert_differs(forward(model, ids), expected)
    handle.undo()
    assert torch.equal(forward(model, ids), expected)
    for module, before in zip(model.modules(), state, strict=True):
        assert vars(module).keys() == before.keys()
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_undone_independently(duplicate):
    model, ids = make_model(), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model), ids)
    other = duplicate(model)
    rope_patch.unpatch(model)
    assert torch.equal(forward(other, ids), expected)
    rope_patch.unpatch(other)
    assert torch.equal(forward(other, ids), plain)


def test_casts_keep_both_rotations_exact():
    model = patched(make_model())
    inputs = (torch.zeros(1, LONG, 4), torch.arange(LONG)[None])
    expected = model.model.rotary_emb(*inputs)
    model.bfloat16()
    assert all(map(torch.equal, model.model.rotary_emb(*inputs), expected))
    assert forward(model, tokens(8)).dtype == torch.bfloat16


def test_start_tokens_keep_a_trained_scaling():
    """Llama 3's scaling was trained, so start tokens keep it."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED // 2,
    }
    model, ids = make_model(rope_parameters=parameters), tokens(START)
    expected = forward(model, ids)
    patched(model)
    assert torch.equal(forward(model, ids), expected)


def test_start_tokens_do_not_keep_a_replaced_scaling():
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model, ids = make_model(rope_parameters=parameters), tokens(START)
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    assert_differs(forward(model, ids), forward(plain, ids))
    patched(model, trained_length=TRAINED)
    assert_close(forward(model, ids), forward(plain, ids))


# -- kernels ---------------------------------------------------------------------------------------


def test_layers_get_tables_of_cos_and_sin():
    model, ids = make_model("qwen3"), tokens(LONG)
    patched(model, kernels="hf")
    expected = forward(model, ids)
    assert not [
        m for m in model.modules() if isinstance(vars(m).get("forward"), PatchedAttentionForward)
    ]
    patched(model)
    forwards = [vars(m).get("forward") for m in model.modules()]
    # In transformers 5.0 the rotary module takes no rows, so a wrapper of single rows holds it.
    functions = [each for f in forwards for each in (f, *getattr(f, "args", ()))]
    assert [f for f in functions if isinstance(f, StartTokenRotary)]
    assert not [f for f in forwards if isinstance(f, PositionPassthrough)]
    assert_close(forward(model, ids), expected)
    assert "start_tokens" in rope_patch.current(model).summary()


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_kernels_without_start_token_support_are_refused(kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    model = make_model()
    with pytest.raises(ValueError, match=r'start_tokens have a rotation of their own.*"auto"'):
        patched(model, kernels=kernels)
    assert rope_patch.current(model) is None
    patched(model, 0, kernels=kernels)


# -- files and engines -----------------------------------------------------------------------------


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_sidecar_stores_start_tokens(family, short_factor, tmp_path):
    model, ids = make_model(family), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model, short_factor=short_factor), ids)
    rope_patch.save(model, tmp_path / "saved")
    sidecar = json.loads((tmp_path / "saved" / "rope_patch.json").read_text())
    assert sidecar["native"] is False
    assert sidecar["options"]["start_tokens"] == START
    assert torch.equal(forward(rope_patch.load(tmp_path / "saved").eval(), ids), expected)
    # Plain transformers loads the unpatched model, not an approximation.
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(forward(native, ids), plain)


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
@pytest.mark.parametrize("engine", ["transformers", "transformers4", "sglang", "llama.cpp", "mlx"])
def test_exports_refuse_start_tokens(engine, short_factor):
    model = patched(make_model(), short_factor=short_factor)
    with pytest.raises(ValueError, match=r"positions below 5 .*\(start_tokens\).*leave start_tok"):
        rope_patch.export(model, engine)
    rope_patch.unpatch(model)
    if engine == "transformers":
        rope_patch.export(patched(model, 0, short_factor=LONG_FACTOR), engine)


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
def test_vllm_needs_the_plugin_for_start_tokens(short_factor):
    model = patched(make_model(), short_factor=short_factor)
    export = rope_patch.export(model, "vllm")
    assert export.needs_plugin
    assert export.config["rope_parameters"]["start_tokens"] == 5
    rope_patch.unpatch(model)
    assert not rope_patch.export(patched(model, 0, short_factor=LONG_FACTOR), "vllm").needs_plugin


def test_adapter_stores_its_start_tokens(tmp_path):
    peft = pytest.importorskip("peft")
    model = patched(make_model())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    rope_patch.save(adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match="start_tokens=5"):
        rope_patch.load_adapter(patched(make_model(), 3), tmp_path / "adapter")
    rope_patch.load_adapter(patched(make_model()), tmp_path / "adapter")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 2.5, math.inf])
def test_start_tokens_must_be_whole(wrong):
    with pytest.raises(ValueError, match="start_tokens must be"):
        patched(make_model(), wrong)


@pytest.mark.parametrize("wrong", ["4", True, None, [4]])
def test_start_tokens_must_be_a_number(wrong):
    with pytest.raises(TypeError, match="start_tokens must be a number"):
        patched(make_model(), wrong)


def test_start_tokens_must_be_within_the_trained_length():
    model = make_model()
    patched(model, TRAINED)
    with pytest.raises(ValueError, match=f"start_tokens must be at most {TRAINED}"):
        patched(model, TRAINED + 1)
    with pytest.raises(ValueError, match=f"start_tokens must be at most {TRAINED - 1}"):
        patched(model, TRAINED, factor=1)


def test_start_tokens_accept_a_whole_float():
    method = rope_patch.patch(make_model(), "longrope", start_tokens=4.0, **OPTIONS).method
    assert method.options()["start_tokens"] == 4
    assert isinstance(method.options()["start_tokens"], int)
    assert not method.has_config_form
    assert rope_patch.patch(
        make_model(), "longrope", start_tokens=0, **OPTIONS
    ).method.has_config_form


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen3_vl"])
def test_several_positions_per_token_are_refused(architecture):
    model = tiny_model(architecture)
    pairs = len(rotary_of(model.model.language_model).inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    with pytest.raises(ValueError, match=r"M-RoPE.*leave start_tokens out"):
        patched(model, long_factor=stretch, short_factor=stretch)
    assert rope_patch.current(model) is None
    patched(model, 0, long_factor=stretch, short_factor=stretch)


def test_attention_factor_in_the_softmax_scale_is_refused():
    model, ids = tiny_model("deepseek_v3"), tokens(LONG)
    stretch = [1 + 0.4 * pair for pair in range(len(rotary_of(model).inv_freq))]
    with pytest.raises(ValueError, match="attention_factor=1, or leave start_tokens out"):
        patched(model, long_factor=stretch, short_factor=stretch)
    options = {"long_factor": stretch, "short_factor": stretch, "attention_factor": 1.0}
    expected = forward(model, ids[:, :START])
    assert torch.equal(forward(patched(model, **options), ids[:, :START]), expected)
    assert_differs(forward(model, ids), forward(patched(model, 0, **options), ids))


def test_config_with_two_sets_is_refused():
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": LONG_FACTOR,
        "short_factor": SHORT_FACTOR,
        "factor": 2.0,
        "original_max_position_embeddings": TRAINED,
    }
    changes = {"rope_parameters": parameters, "max_position_embeddings": TARGET}
    model = make_model("llama", make_config("llama", **changes))
    with pytest.raises(ValueError, match=r'two of them.*start="unscaled"'):
        patched(model, short_factor=None)
    patched(model, start="unscaled", factor=8)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="accelerate's hooks are tried on the newest")
def test_accelerate_hooks_around_the_rotary_module_stay():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids = make_model(), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model), ids)
    rope_patch.unpatch(model)
    add_hook_to_module(model.model.rotary_emb, ModelHook())
    assert torch.equal(forward(patched(model), ids), expected)
    rope_patch.unpatch(model)
    remove_hook_from_module(model.model.rotary_emb)
    assert torch.equal(forward(model, ids), plain)
