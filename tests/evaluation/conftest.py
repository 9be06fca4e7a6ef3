"""Models and a tokenizer for the tests of the language model, and figures that are not drawn."""

from functools import partial

import pytest
from helpers.tiny_models import make_model
from helpers.undrawn import leave_undrawn
from language_models import METHODS, TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch

# Gemma3's windows are shorter than the prompts.
MODELS = [("llama", name) for name in METHODS]
MODELS += [("gemma3", name) for name in ("yarn", "dynamic-yarn")]
MODELS += [pytest.param(("gemma3", "none"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def trained_llama():
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture
def llama():
    """Return a model of trained length 64."""
    return make_model("llama", vocab_size=512)


@pytest.fixture(params=MODELS, ids=lambda pair: "-".join(pair))
def model(request):
    """Return a model of trained length 64 with a method."""
    family, name = request.param
    model = make_model(family, vocab_size=512)
    if METHODS[name]:
        rope_patch.patch(model, **METHODS[name])
    return model


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("rope_patch.inference.prefix_reader._CHUNK", 32)


@pytest.fixture
def batch_up_to(monkeypatch):
    """Return a function that sets up to how many tokens questions are read in batches."""
    return partial(monkeypatch.setattr, "rope_patch.evaluation.language_model.BATCHABLE_TOKENS")


@pytest.fixture
def undrawn(monkeypatch):
    leave_undrawn(monkeypatch)
