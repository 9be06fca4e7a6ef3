"""Models and a tokenizer for the tests of the language model."""

import pytest
from helpers.tiny_models import make_model
from language_models import METHODS, TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.inference import prefix_reader


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def trained_llama():
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def base_model(request):
    """Return a model of trained length 64; Gemma3's windows are shorter than the prompt."""
    return make_model(request.param, vocab_size=512)


@pytest.fixture
def llama():
    return make_model("llama", vocab_size=512)


@pytest.fixture(params=METHODS)
def model(request, base_model):
    if request.param == "none":
        yield base_model
        return
    with rope_patch.patch(base_model, **METHODS[request.param]):
        yield base_model


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(prefix_reader, "_CHUNK", 32)
