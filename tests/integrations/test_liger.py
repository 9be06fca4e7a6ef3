"""Test Liger's rotation with a patch, in either order.

Liger's kernels need a GPU, so a stand-in replaces the function in the modeling file, as Liger does,
for all models of the process. The last tests use Liger if it is installed, in Triton's interpreter.
"""

import copy
import logging

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    TRAINED,
    assert_close,
    logits,
    make_model,
    step_by_step,
    tokens,
)
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import rope_patch

FILES = {"llama": modeling_llama, "qwen3": modeling_qwen3}
REQUESTS = pytest.mark.parametrize(
    ("family", "method", "options"),
    [("llama", "dynamic-yarn", {}), ("qwen3", "yarn", {"factor": 4})],
)


class Calls(list):
    """The shapes of the stand-in's arguments."""


@pytest.fixture
def liger(monkeypatch):
    """Return a function that installs a stand-in for Liger's rotation, with its calls."""
    calls = Calls()

    def put(family, on_a_gpu):
        def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
            calls.append(q.shape)
            if not on_a_gpu:
                raise ValueError("Pointer argument (at 0) cannot be accessed from Triton")
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

            def rotate(x):
                first, second = x.chunk(2, dim=-1)
                return x * cos + torch.cat((-second, first), dim=-1) * sin

            return rotate(q), rotate(k)

        liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
        monkeypatch.setattr(FILES[family], "apply_rotary_pos_emb", liger_rotary_pos_emb)

    put.calls = calls
    return put


def decode(model):
    """Return the logits of steps across the trained length."""
    return step_by_step(model, tokens(TRAINED + 6), TRAINED - 4)


def logged_messages(caplog):
    messages = [record.getMessage() for record in caplog.records if record.name == "rope_patch"]
    return [message for message in messages if "Liger" in message]


@REQUESTS
def test_liger_after_a_patch_does_not_reach_the_model(liger, family, method, options, caplog):
    model = make_model(family)
    plain = logits(model)
    handle = rope_patch.patch(model, method, **options)
    expected = logits(model)
    decoded = decode(model)
    assert not logged_messages(caplog)
    liger(family, on_a_gpu=False)
    assert logits(model).equal(expected)
    assert decode(model).equal(decoded)
    assert not liger.calls
    (message,) = logged_messages(caplog)  # once, at the first forward after it
    assert f"apply_rotary_pos_emb of {FILES[family].__name__}" in message
    assert "liger_kernel_config={'rope': False}" in message

    assert logits(copy.deepcopy(model)).equal(expected)
    assert not liger.calls
    handle.undo()
    with pytest.raises(ValueError, match="Triton"):
        logits(model)  # calls Liger's function, like an unpatched model
    liger(family, on_a_gpu=True)
    assert_close(logits(model), plain)


@REQUESTS
def test_liger_before_a_patch_is_logged_and_replaced(liger, family, method, options, caplog):
    reference, model = make_model(family), make_model(family)
    rope_patch.patch(reference, method, **options)
    expected = logits(reference)
    decoded = decode(reference)
    liger(family, on_a_gpu=False)
    handle = rope_patch.patch(model, method, **options)
    (message,) = logged_messages(caplog)
    assert "rope_patch's own" in message
    assert logits(model).equal(expected)
    assert decode(model).equal(decoded)
    assert not liger.calls
    assert handle.summary() == rope_patch.current(reference).summary()
    assert len(logged_messages(caplog)) == 1


@pytest.mark.parametrize("first", ["liger", "patch"])
@REQUESTS
def test_kernels_hf_use_ligers_rotation(liger, family, method, options, first, caplog):
    reference, model = make_model(family), make_model(family)
    rope_patch.patch(reference, method, kernels="hf", **options)
    expected = logits(reference)
    decoded = decode(reference)
    if first == "liger":
        liger(family, on_a_gpu=True)
    rope_patch.patch(model, method, kernels="hf", **options)
    if first == "patch":
        assert not logged_messages(caplog)
        liger(family, on_a_gpu=True)
    assert_close(logits(model), expected)
    assert_close(decode(model), decoded)
    assert liger.calls
    (message,) = logged_messages(caplog)
    assert "it rotates this model now, by the frequencies of the patch" in message


def test_liger_for_another_architecture_is_not_logged(liger, caplog):
    model = make_model("qwen3")
    rope_patch.patch(model, "yarn", factor=4)
    liger("llama", on_a_gpu=False)
    logits(model)
    assert not logged_messages(caplog)


def test_compiled_model_is_one_graph_with_liger(liger):
    torch._dynamo.reset()
    model = make_model(num_hidden_layers=1)  # faster to trace
    rope_patch.patch(model, "yarn", factor=4)
    expected = logits(model)
    liger("llama", on_a_gpu=False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(logits(compiled), expected)
    torch._dynamo.reset()


# -- installed Liger -------------------------------------------------------------------------------


@pytest.fixture
def restored_modules():
    """Remove Liger from the modeling files after a test."""
    before = [(module, dict(vars(module))) for module in FILES.values()]
    kinds = [modeling_llama.LlamaForCausalLM, modeling_qwen3.Qwen3ForCausalLM]
    forwards = [kind.forward for kind in kinds]
    yield
    for module, names in before:
        vars(module).update(names)
    for kind, function in zip(kinds, forwards, strict=True):
        kind.forward = function


@REQUESTS
def test_trainer_flag_with_a_patch(family, method, options, tmp_path, caplog, restored_modules):
    pytest.importorskip("liger_kernel")
    ids = tokens(LONG, batch=2)
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def losses(folder, **flags):
        model = make_model(family)
        rope_patch.patch(model, method, **options)
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            optim="sgd",
            learning_rate=0.05,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **flags,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    expected = losses(tmp_path / "plain")
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        # The other kernels take too long in the interpreter.
        others = {"rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": False}
        flags = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True, **others}}
        assert losses(tmp_path / "liger", **flags) == expected
    assert FILES[family].apply_rotary_pos_emb.__module__ == "liger_kernel.transformers.rope"
    (message,) = logged_messages(caplog)
    assert "rope_patch's own" in message
