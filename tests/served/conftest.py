"""A server of the tiny trained Llama with YaRN, and its evaluation in this process."""

import pytest
from helpers.engine_server import EngineServer
from helpers.evaluations import TINY, request
from helpers.undrawn import leave_undrawn
from served_parts import PARTS
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation import evaluate


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    leave_undrawn(monkeypatch)


@pytest.fixture(scope="session")
def served_model():
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(model, "yarn", factor=4)
    return model


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def make_server(served_model, tokenizer):
    """Return a function that makes a server of the model with YaRN, with other settings."""

    def make(**settings):
        return EngineServer(**{"model": served_model, "tokenizer": tokenizer, **settings})

    return make


@pytest.fixture(scope="session")
def in_process(tmp_path_factory):
    """Return the results of the same model in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_undrawn(monkeypatch)
        folder = tmp_path_factory.mktemp("in-process")
        return evaluate(request(folder, methods=("yarn",), **PARTS))
