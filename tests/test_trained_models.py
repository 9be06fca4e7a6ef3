"""Test extension methods on three small trained models that recall keys and values."""

from pathlib import Path

import pytest
import torch
from helpers.reference_rerotation import Reference
from helpers.tiny_models import step_by_step
from measure_tiny import decode, recall_and_log_likelihood, requests, without_key_rerotation
from train_tiny import recall_accuracy, recall_batch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.methods import registered_methods

ASSETS = Path(__file__).parent / "assets"
TRAINED = 256
SEQUENCES = 8  # of 8 queries each
COLLAPSED = {"llama": 0.5, "qwen3": 0.5, "gemma3": 0.7}  # at four times the trained length
DYNAMIC = [name for name in registered_methods() if name.startswith("dynamic")]


def load(name):
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{name}")


@pytest.fixture(scope="module")
def models():
    return {name: load(name) for name in COLLAPSED}


# Qwen 3 differs from Llama in nothing that these tests see.
@pytest.fixture(params=["llama", pytest.param("qwen3", marks=pytest.mark.slow), "gemma3"])
def model(request, models):
    return models[request.param]


def recall(model, length):
    return recall_accuracy(model, length, SEQUENCES)


def questions(length, sequences=SEQUENCES):
    return recall_batch(torch.Generator().manual_seed(1234), sequences, length, pairs=8)


def decoded_recall(model, length):
    """Return the recall of decoding with a cache, after a prompt of the trained length."""
    input_ids, labels = questions(length)
    return recall_and_log_likelihood(decode(model, input_ids, step=32), labels)[0]


def relative_difference(got, expected):
    """Return the largest difference of logits, relative to the largest logit."""
    return (got - expected).abs().max() / expected.abs().max()


# -- reading in one pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLLAPSED)
def test_plain_recall_collapses_at_four_times_the_trained_length(name, models):
    model = models[name]
    assert recall(model, TRAINED) >= 0.95
    assert recall(model, 4 * TRAINED) <= COLLAPSED[name]


@pytest.mark.parametrize("request_", [{"method": "yarn", "factor": 4}, {"method": "dynamic-yarn"}])
def test_yarn_keeps_recall_at_four_times_the_trained_length(model, request_):
    with rope_patch.patch(model, **request_):
        assert recall(model, 4 * TRAINED) >= 0.9


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # most of Gemma 3 sees near tokens only
def test_linear_costs_recall_at_short_lengths(name, models):
    model = models[name]
    plain = recall(model, TRAINED // 2)
    with rope_patch.patch(model, "linear", factor=4):
        assert recall(model, TRAINED // 2) <= plain - 0.1


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("llama", method) for method in DYNAMIC), ("gemma3", "dynamic-yarn")],
)
def test_dynamic_methods_cost_nothing_up_to_the_trained_length(models, name, method):
    model = models[name]
    input_ids, _ = questions(2 * TRAINED, sequences=1)
    lengths = (TRAINED // 2, TRAINED, 2 * TRAINED)
    with torch.no_grad():
        *plain, beyond = [model(input_ids[:, :length]).logits for length in lengths]
        with rope_patch.patch(model, method):
            *got, extended = [model(input_ids[:, :length]).logits for length in lengths]
    assert all(map(torch.equal, got, plain))
    assert not torch.equal(extended, beyond)


def test_undo_restores_the_trained_model_bit_for_bit(model):
    ids = torch.arange(300)[None] % 512
    with torch.no_grad():
        before = model(ids).logits
        with rope_patch.patch(model, "yarn", factor=4):
            assert not torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)


# -- decoding with cached keys ---------------------------------------------------------------------


def test_dynamic_yarn_keeps_recall_while_decoding_to_four_times_the_trained_length(model):
    with rope_patch.patch(model, "dynamic-yarn"):
        assert decoded_recall(model, 4 * TRAINED) >= 0.9


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "longrope"), ("qwen3", "dynamic-yarn"), ("gemma3", "dynamic-yarn")],
)
def test_decode_steps_match_rotating_all_keys_afresh(models, name, method):
    model, options = models[name], {}
    input_ids, _ = questions(370, sequences=1)  # three steps of growth
    if method == "longrope":
        stretch = requests(model)["longrope"]["long_factor"]
        options = {"factor": 4, "long_factor": stretch, "short_factor": [1.0] * len(stretch)}
    truth = Reference(model, method, options=options).decode(input_ids, TRAINED - 6)
    with rope_patch.patch(model, method, **options):
        assert relative_difference(step_by_step(model, input_ids, TRAINED - 6), truth) < 1e-5
        with without_key_rerotation(model, native=False) as stale:
            assert relative_difference(step_by_step(stale, input_ids, TRAINED - 6), truth) > 0.1


@pytest.mark.parametrize(
    ("name", "row"), [("llama", "longrope"), ("gemma3", "dynamic, growth exact")]
)
def test_stale_keys_match_transformers_without_rerotation(models, name, row):
    model = models[name]
    input_ids, _ = questions(2 * TRAINED, sequences=1)
    with rope_patch.patch(model, **requests(model)[row]):
        rerotated = decode(model, input_ids, step=16)
        with without_key_rerotation(model, native=False) as stale:
            emulated = decode(stale, input_ids, step=16)
        with without_key_rerotation(model, native=True) as native:
            expected = decode(native, input_ids, step=16)
    assert relative_difference(emulated, expected) < 1e-4
    assert relative_difference(rerotated, expected) > 0.1


@pytest.mark.parametrize(("row", "native"), [("longrope", True), ("dynamic-linear", False)])
def test_stale_keys_cost_recall(models, row, native):
    llama = models["llama"]
    with rope_patch.patch(llama, **requests(llama)[row]):
        rerotated = decoded_recall(llama, 2 * TRAINED)
        assert rerotated >= recall(llama, 2 * TRAINED) - 0.05
        with without_key_rerotation(llama, native) as stale:
            assert decoded_recall(stale, 2 * TRAINED) <= rerotated - 0.1
