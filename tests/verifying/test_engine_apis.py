"""Test each engine's client against a real server with its API."""

import copy

import pytest
import torch
from helpers.engine_server import EngineServer, fixed_answer
from helpers.tiny_models import make_model
from helpers.wrong_engines import ASSETS, CONFIGS, FACTOR, configured, plain

import rope_patch
from rope_patch.verifying.engine import CannotVerify
from rope_patch.verifying.engine_detection import open_engine
from rope_patch.verifying.probe_prompts import ProbePrompt

TINY = ASSETS / "tiny-llama"
IDS = (1, 7, 300, 42, 7, 300)
PROMPT = ProbePrompt("near", IDS, (1, 3, 5))


def verify(url, **arguments):
    request = {"method": "yarn", "factor": FACTOR, "progress": False}
    return rope_patch.verify(url, against=TINY, **{**request, **arguments})


@pytest.fixture(scope="module")
def model():
    return configured("llama", CONFIGS["as asked"][0])


@pytest.mark.parametrize(
    ("settings", "client"),
    [
        ({}, "OpenAICompletions"),
        ({"least_tokens": 1}, "OpenAICompletions"),
        ({"log_probs": "vllm"}, "OpenAICompletions"),
        ({"api": "llama.cpp"}, "LlamaCppServer"),
        ({"api": "sglang"}, "SGLang"),
    ],
)
def test_client_reads_the_log_probabilities_of_a_prompt_and_of_written_tokens(
    model, settings, client
):
    with EngineServer(model, **settings).running() as url:
        engine = open_engine(url + "/v1" if not settings else url)
        assert type(engine).__name__ == client
        observed = engine.observe(PROMPT)
        written = None if settings.get("log_probs") else engine.write(IDS, 3)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    assert observed.prompt == PROMPT
    expected = [float(logits[p - 1, IDS[p]]) for p in PROMPT.scored]
    assert observed.log_probs == pytest.approx(expected, abs=1e-5)
    if written is not None:
        assert written.prompt.decoded_from == len(IDS)
        assert written.prompt.ids[len(IDS)] == int(logits[-1].argmax())
        assert written.log_probs[0] == pytest.approx(float(logits[-1].max()), abs=1e-5)


@pytest.mark.parametrize("api", ["llama.cpp", "sglang"])
@pytest.mark.parametrize("case", ["as asked", "factor ignored", "attention factor dropped"])
def test_verdicts_through_other_apis(api, case):
    parameters, expected = CONFIGS[case]
    with EngineServer(configured("llama", parameters), api=api).running() as url:
        assert verify(url).verdict.explains == (expected,)


def test_stale_keys_need_the_ids_that_a_server_writes():
    server = EngineServer(plain(), says_ids=False)
    with server.running() as url:
        found = verify(url, method="dynamic-yarn", factor=None)
    assert found.verdict.explains == ("unscaled",)
    assert found.untested["stale-keys"] == "the engine does not say which ids it writes"


def test_prompts_fit_into_the_engine(model):
    with EngineServer(model, max_model_len=300).running() as url:
        found = verify(url)
    assert found
    assert found.longest == 299
    assert not found.untested


def test_what_prompts_are_too_short_for_is_said(model):
    with EngineServer(model, max_model_len=200).running() as url:
        found = verify(url)
    assert found
    (why,) = found.untested.values()
    assert why == "the engine accepts 200 tokens"
    assert "not tested: a table of cos and sin" in str(found)


# -- errors ----------------------------------------------------------------------------------------


def test_server_that_is_not_there():
    with EngineServer(plain()).running() as url:
        pass
    with pytest.raises(CannotVerify, match=r"no server answers at .*start it"):
        verify(url)


def test_address_that_is_none():
    with pytest.raises(CannotVerify, match="expected the address of a server"):
        verify("localhost:8000")


def test_server_without_log_probabilities(model):
    with (
        EngineServer(model, log_probs="none").running() as url,
        pytest.raises(CannotVerify, match="without log-probabilities of the prompt's tokens"),
    ):
        verify(url)


@pytest.mark.parametrize("api", ["llama.cpp", "sglang"])
def test_other_servers_without_log_probabilities(model, api):
    with (
        EngineServer(model, api=api, log_probs="none").running() as url,
        pytest.raises(CannotVerify, match="answers without"),
    ):
        verify(url)


ANSWERS = {
    "a page": (200, b"<html>hello</html>", "answered no JSON.*address of the server itself"),
    "a refusal": (401, b'{"error": "Unauthorized"}', "answered 401: Unauthorized.*OPENAI_API_KEY"),
    "a crash": (500, b"crashed", "answered 500: crashed.*expected a list of models"),
    "a list": (200, b"[1, 2]", "serves no model, expected at least one"),
    "words for numbers": (
        200,
        b'{"data": [{"id": "x"}], "choices": [{"logprobs": {"token_logprobs": [null, "a"]}}]}',
        "answers in an unknown form.*--engine",
    ),
    "not a number": (
        200,
        b'{"data": [{"id": "x"}], "choices": [{"logprobs": {"token_logprobs": [null, NaN]}}]}',
        "answers NaN for 1 of 1 tokens.*another dtype",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_servers_that_are_no_engines(case):
    status, body, message = ANSWERS[case]
    with fixed_answer(status, body) as url, pytest.raises(CannotVerify, match=message):
        verify(url)


def test_server_that_is_busy():
    with (
        fixed_answer(200, b"{}", seconds=3) as url,
        pytest.raises(CannotVerify, match=r"did not answer within 1 s.*--seconds"),
    ):
        verify(url, seconds=1)


def test_other_model():
    other = copy.deepcopy(plain())
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight.roll(5, 0))
    with (
        EngineServer(other).running() as url,
        pytest.raises(CannotVerify, match=r"serves another model.*--against"),
    ):
        verify(url)


@pytest.mark.parametrize("api", ["openai", "llama.cpp"])
def test_other_vocabulary(api):
    with (
        EngineServer(make_model("llama"), api=api).running() as url,
        pytest.raises(CannotVerify, match=r"vocabulary.*--against"),
    ):
        verify(url)


def test_served_model_that_the_server_does_not_have(model):
    with (
        EngineServer(model).running() as url,
        pytest.raises(CannotVerify, match=r"serves 'tiny', expected 'large'"),
    ):
        verify(url, served_model="large")


def test_engine_that_is_another_one(model):
    with (
        EngineServer(model).running() as url,
        pytest.raises(CannotVerify, match=r"/props does not answer as llama\.cpp does"),
    ):
        verify(url, engine="llama.cpp")


def test_model_that_is_compared_with_itself(model):
    with pytest.raises(CannotVerify, match="the very model that is verified"):
        rope_patch.verify(model, against=model)


def test_options_without_a_method(model):
    with pytest.raises(CannotVerify, match="belong to a method"):
        rope_patch.verify(model, against=TINY, factor=4)
