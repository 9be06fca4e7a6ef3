"""Start tokens under compilation, undoing, copies and saving, and where they are refused."""

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


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("same", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_in_one_graph(same):
    """With one set of frequencies, and with two that follow the length."""
    short = LONG_FACTOR if same else SHORT_FACTOR
    model = patched(make_model(num_hidden_layers=1), short_factor=short)
    compiled = torch.compile(model, fullgraph=True, backend="eager" if same else "aot_eager")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    assert_close(forward(compiled, ids), forward(model, ids))
    expected = forward(model, ids, attention_mask=mask)
    assert_close(forward(compiled, ids, attention_mask=mask), expected)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_decoding_steps():
    model, ids = patched(one_layer()), tokens(TRAINED + 8)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, : TRAINED - 4], past_key_values=cache)
        for i in range(TRAINED - 4, ids.shape[1]):
            at = torch.tensor([[i]])
            got = step(ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits
    assert_close(got[:, -1], forward(model, ids)[:, -1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_undoing_is_bit_exact(family):
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
def test_copies_are_undone_by_themselves(duplicate):
    model, ids = make_model(), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model), ids)
    other = duplicate(model)
    rope_patch.unpatch(model)
    assert torch.equal(forward(other, ids), expected)
    rope_patch.unpatch(other)
    assert torch.equal(forward(other, ids), plain)


def test_casts_leave_both_rotations_exact():
    model = patched(make_model())
    given = (torch.zeros(1, LONG, 4), torch.arange(LONG)[None])
    expected = model.model.rotary_emb(*given)
    model.bfloat16()
    assert all(map(torch.equal, model.model.rotary_emb(*given), expected))
    assert forward(model, tokens(8)).dtype == torch.bfloat16


def test_a_start_from_the_configs_own_scaling():
    """Llama 3's scaling was trained in: the first tokens keep that."""
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


def test_a_scaling_that_is_replaced_is_not_what_they_keep():
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model, ids = make_model(rope_parameters=scaled), tokens(START)
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    assert_differs(forward(model, ids), forward(plain, ids))
    patched(model, trained_length=TRAINED)
    assert_close(forward(model, ids), forward(plain, ids))


# -- who rotates ---------------------------------------------------------------------------------


def test_tables_of_cos_and_sin_are_what_layers_get():
    model, ids = make_model("qwen3"), tokens(LONG)
    patched(model, kernels="hf")
    expected = forward(model, ids)
    assert not [
        m for m in model.modules() if isinstance(vars(m).get("forward"), PatchedAttentionForward)
    ]
    patched(model)
    forwards = [vars(m).get("forward") for m in model.modules()]
    # Where a rotary module takes no rows of its own (5.0), it is within what gives it one by one.
    within = [each for f in forwards for each in (f, *getattr(f, "args", ()))]
    assert [f for f in within if isinstance(f, StartTokenRotary)]
    assert not [f for f in forwards if isinstance(f, PositionPassthrough)]
    assert_close(forward(model, ids), expected)
    assert "start_tokens" in rope_patch.current(model).summary()


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_kernels_that_cannot_say_it_are_refused(kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    model = make_model()
    with pytest.raises(ValueError, match=r'start_tokens have a rotation of their own.*"auto"'):
        patched(model, kernels=kernels)
    assert rope_patch.current(model) is None
    patched(model, 0, kernels=kernels)


# -- files and engines ---------------------------------------------------------------------------


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_the_sidecar_carries_them(family, short_factor, tmp_path):
    model, ids = make_model(family), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model, short_factor=short_factor), ids)
    rope_patch.save(model, tmp_path / "saved")
    sidecar = json.loads((tmp_path / "saved" / "rope_patch.json").read_text())
    assert sidecar["native"] is False
    assert sidecar["options"]["start_tokens"] == START
    assert torch.equal(forward(rope_patch.load(tmp_path / "saved").eval(), ids), expected)
    # Nothing that is nearly right: transformers by itself gets the model as it was.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(forward(theirs, ids), plain)


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
@pytest.mark.parametrize(
    "engine", ["transformers", "transformers4", "vllm", "sglang", "llama.cpp", "mlx"]
)
def test_no_engine_gets_a_rotation_without_them(engine, short_factor):
    model = patched(make_model(), short_factor=short_factor)
    with pytest.raises(ValueError, match=r"positions below 5 .*\(start_tokens\).*leave start_tok"):
        rope_patch.export(model, engine)
    rope_patch.unpatch(model)
    if engine in ("transformers", "vllm"):
        rope_patch.export(patched(model, 0, short_factor=LONG_FACTOR), engine)


def test_an_adapter_knows_its_start_tokens(tmp_path):
    peft = pytest.importorskip("peft")
    model = patched(make_model())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    rope_patch.save(adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match="start_tokens=5"):
        rope_patch.load_adapter(patched(make_model(), 3), tmp_path / "adapter")
    rope_patch.load_adapter(patched(make_model()), tmp_path / "adapter")


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 2.5, math.inf])
def test_a_number_of_tokens_is_whole(wrong):
    with pytest.raises(ValueError, match="start_tokens must be"):
        patched(make_model(), wrong)


@pytest.mark.parametrize("wrong", ["4", True, None, [4]])
def test_a_number_of_tokens_is_a_number(wrong):
    with pytest.raises(TypeError, match="start_tokens must be a number"):
        patched(make_model(), wrong)


def test_they_are_within_the_trained_length():
    model = make_model()
    patched(model, TRAINED)
    with pytest.raises(ValueError, match=f"start_tokens must be at most {TRAINED}"):
        patched(model, TRAINED + 1)
    with pytest.raises(ValueError, match=f"start_tokens must be at most {TRAINED - 1}"):
        patched(model, TRAINED, factor=1)


def test_whole_numbers_of_other_types():
    method = rope_patch.patch(make_model(), "longrope", start_tokens=4.0, **OPTIONS).method
    assert method.options()["start_tokens"] == 4
    assert isinstance(method.options()["start_tokens"], int)
    assert not method.has_config_form
    assert rope_patch.patch(
        make_model(), "longrope", start_tokens=0, **OPTIONS
    ).method.has_config_form


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen3_vl"])
def test_several_positions_are_refused(architecture):
    model = tiny_model(architecture)
    pairs = len(rotary_of(model.model.language_model).inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    with pytest.raises(ValueError, match=r"M-RoPE.*leave start_tokens out"):
        patched(model, long_factor=stretch, short_factor=stretch)
    assert rope_patch.current(model) is None
    patched(model, 0, long_factor=stretch, short_factor=stretch)


def test_softmax_scales_know_no_tokens():
    model, ids = tiny_model("deepseek_v3"), tokens(LONG)
    stretch = [1 + 0.4 * pair for pair in range(len(rotary_of(model).inv_freq))]
    with pytest.raises(ValueError, match="attention_factor=1, or leave start_tokens out"):
        patched(model, long_factor=stretch, short_factor=stretch)
    given = {"long_factor": stretch, "short_factor": stretch, "attention_factor": 1.0}
    expected = forward(model, ids[:, :START])
    assert torch.equal(forward(patched(model, **given), ids[:, :START]), expected)
    assert_differs(forward(model, ids), forward(patched(model, 0, **given), ids))


def test_two_rotations_from_before_are_one_too_many():
    own = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": LONG_FACTOR,
        "short_factor": SHORT_FACTOR,
        "factor": 2.0,
        "original_max_position_embeddings": TRAINED,
    }
    changes = {"rope_parameters": own, "max_position_embeddings": TARGET}
    model = make_model("llama", make_config("llama", **changes))
    with pytest.raises(ValueError, match=r'two of them.*start="unscaled"'):
        patched(model, short_factor=None)
    patched(model, start="unscaled", factor=8)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="accelerate's hooks are tried on the newest")
def test_hooks_of_accelerate_around_it_stay():
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
