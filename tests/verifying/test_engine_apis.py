"""Test each engine's client against a real server with its API."""

import copy

import pytest
import torch
from helpers.engine_server import EngineServer, fixed_answer
from helpers.kept_predictions import verify
from helpers.tiny_models import make_model
from helpers.wrong_engines import ASSETS, CONFIGS, configured, plain

import rope_patch
from rope_patch.verifying import CannotVerify, ProbePrompt, open_engine

TINY = ASSETS / "tiny-llama"
IDS = (1, 7, 300, 42, 7, 300)
PROMPT = ProbePrompt("near", IDS, (1, 3, 5))


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


@pytest.mark.parametrize(
    ("api", "case"),
    [
        ("openai", "as asked"),
        ("openai", "attention factor dropped"),
        pytest.param("llama.cpp", "as asked", marks=pytest.mark.slow),
        ("llama.cpp", "attention factor dropped"),
        pytest.param("sglang", "as asked", marks=pytest.mark.slow),
        ("sglang", "attention factor dropped"),
    ],
)
def test_verdicts_through_each_api(api, case):
    engine = configured("llama", CONFIGS[case][0])
    with EngineServer(engine, api=api).running() as url:
        assert verify(url).verdict.explains == (CONFIGS[case][1],)


def test_a_place_of_which_llama_cpp_says_nothing_is_left_out(model, monkeypatch):
    server = EngineServer(model, api="llama.cpp")
    answer = server._completion

    def of_a_part_of_a_character(body):
        silent = len(body["prompt"]) == PROMPT.scored[1]
        return (200, {"content": "\ufffd"}) if silent else answer(body)

    monkeypatch.setattr(server, "_completion", of_a_part_of_a_character)
    with server.running() as url:
        observed = open_engine(url).observe(PROMPT)
    assert observed.prompt.scored == (PROMPT.scored[0], PROMPT.scored[2])


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


def require_refusal(url, fact, **arguments):
    with pytest.raises(CannotVerify, match=fact):
        verify(url, **arguments)


def test_server_that_is_not_there():
    with EngineServer(plain()).running() as url:
        pass
    require_refusal(url, "start it")
    require_refusal("localhost:8000", "the address of a server")


@pytest.mark.parametrize(
    ("settings", "arguments", "fact"),
    [
        ({"log_probs": "none"}, {}, "without log-probabilities"),
        ({"log_probs": "none", "api": "llama.cpp"}, {}, "answers without"),
        ({"log_probs": "none", "api": "sglang"}, {}, "answers without"),
        ({}, {"served_model": "large"}, "'tiny', expected 'large'"),
        ({}, {"engine": "llama.cpp"}, "/props"),
    ],
)
def test_server_that_cannot_be_asked(model, settings, arguments, fact):
    with EngineServer(model, **settings).running() as url:
        require_refusal(url, fact, **arguments)


def rolled():
    """Return a model that is another one: its tokens have the embeddings of others."""
    other = copy.deepcopy(plain())
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight.roll(5, 0))
    return other


@pytest.mark.parametrize(
    ("make", "api", "fact"),
    [
        (rolled, "openai", "another model.*--against"),
        (lambda: make_model("llama"), "openai", "vocabulary.*--against"),
        (lambda: make_model("llama"), "llama.cpp", "vocabulary.*--against"),
    ],
)
def test_server_of_another_model(make, api, fact):
    with EngineServer(make(), api=api).running() as url:
        require_refusal(url, fact)


LOG_PROBS = b'{"data": [{"id": "x"}], "choices": [{"logprobs": {"token_logprobs": [null, %s]}}]}'


@pytest.mark.parametrize(
    ("status", "body", "fact"),
    [
        (200, b"<html>hello</html>", "no JSON"),
        (401, b'{"error": "Unauthorized"}', "401: Unauthorized.*OPENAI_API_KEY"),
        (500, b"crashed", "500: crashed"),
        (200, b"[1, 2]", "no model"),
        (200, LOG_PROBS % b'"a"', "unknown form.*--engine"),
        (200, LOG_PROBS % b"NaN", "NaN for 1 of 1 tokens.*dtype"),
    ],
    ids=["a page", "a refusal", "a crash", "a list", "words for numbers", "not a number"],
)
def test_servers_that_are_no_engines(status, body, fact):
    with fixed_answer(status, body) as url:
        require_refusal(url, fact)


def test_server_that_is_busy():
    with fixed_answer(200, b"{}", seconds=3) as url:
        require_refusal(url, "within 1 s.*--seconds", seconds=1)


def test_requests_that_make_no_sense(model):
    with pytest.raises(CannotVerify, match="the very model"):
        rope_patch.verify(model, against=model)
    with pytest.raises(CannotVerify, match="belong to a method"):
        rope_patch.verify(model, against=TINY, factor=4)
