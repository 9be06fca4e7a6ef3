"""Models for the tests of the language model."""

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
def trained():
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def made(request):
    """Gemma3's windows are shorter than the prompt; both were trained on 64 tokens."""
    return make_model(request.param, vocab_size=512)


@pytest.fixture
def llama():
    return make_model("llama", vocab_size=512)


@pytest.fixture(params=METHODS)
def model(request, made):
    if request.param == "none":
        yield made
        return
    with rope_patch.patch(made, **METHODS[request.param]):
        yield made


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(prefix_reader, "_CPU_CHUNK", 32)
