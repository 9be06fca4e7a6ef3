"""Test what is refused of a server, by name, before any sample is asked."""

import pytest
from helpers.commands import run_in_this_process
from helpers.engine_server import answering, fixed_answer
from helpers.evaluations import TINY

import rope_patch
from rope_patch.served import ServedRequest

SMALL = {"lengths": [200], "tasks": ["rp_recall_ll"], "verify": False}


def refusal(url, folder, **options):
    with pytest.raises(ValueError, match=" ") as raised:
        rope_patch.evaluate_server(url, TINY, out=folder, **{**SMALL, **options})
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"factor": 4.0}, ["factor cannot be asked of a server", "rope-patch export"]),
        ({"length": 1024}, ["length cannot be asked", "start the server with"]),
        ({"options": {"beta_fast": 16}}, ["options cannot be asked"]),
        ({"quantization": "Q8_0"}, ["serve the quantised weights"]),
        ({"until_decided": True}, ["--precision"]),
        ({"share": False}, ["prefix caching"]),
        ({"tasks": ["speed"]}, ["speed compares methods"]),
        ({"concurrency": 0}, ["concurrency must be at least 1"]),
        ({"tasks": ["rp_no_such"]}, ["unknown task"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_server_cannot_be_asked_is_refused_unreached(tmp_path, options, facts):
    message = refusal("http://127.0.0.1:9", tmp_path, **options)
    assert all(fact in message for fact in facts)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["--method", "yarn", "--tokenizer", TINY], "`rope-patch export MODEL --method METHOD"),
        ([], "--tokenizer MODEL"),
        (["--tokenizer", TINY, "--engine", "vllm"], "--engine prints commands"),
    ],
)
def test_the_command_refuses_what_a_server_cannot_do(tmp_path, words, fact):
    output = run_in_this_process("eval", "http://127.0.0.1:9", *words, "--out", tmp_path)
    assert output.returncode == 2
    assert fact in output.stderr


def test_options_of_servers_need_an_address(tmp_path):
    words = ("--method", "none", "--tokenizer", TINY, "--out", tmp_path)
    output = run_in_this_process("eval", TINY, *words)
    assert output.returncode == 2
    assert "--tokenizer goes with a server's address" in output.stderr


def test_an_address_is_no_model(tmp_path):
    for function in (rope_patch.evaluate, rope_patch.compare):
        with pytest.raises(ValueError, match="evaluate_server"):
            function("http://127.0.0.1:9", out=tmp_path, lengths=[200])


def test_lengths_beyond_the_limit_of_the_server(make_server, tmp_path):
    server = make_server(max_model_len=400)
    with server.running() as url:
        message = refusal(url, tmp_path, lengths=[200, 448])
    assert "takes 400 tokens at most" in message
    assert "--lengths up to 400" in message
    assert max(map(len, server.prompts)) < 100  # nothing but a short prompt was asked


def test_a_limit_that_the_server_does_not_say_is_met_before_any_sample(make_server, tmp_path):
    server = make_server(max_model_len=150, says_limit=False)
    with server.running() as url:
        assert "maximum context length is 150 tokens" in refusal(url, tmp_path)
    assert len(server.prompts) == 3


def test_a_server_that_cuts_prompts(make_server, tmp_path):
    with make_server(cut_to=150).running() as url:
        message = refusal(url, tmp_path)
    assert "read 150 tokens of a prompt of 200 token ids: it cut the prompt" in message


def test_a_server_that_cuts_prompts_and_gives_no_log_probabilities(make_server, tmp_path):
    with make_server(cut_to=150, log_probs="none").running() as url:
        message = refusal(url, tmp_path, tasks=["rp_recall"])
    assert "it cut the prompt" in message


def test_a_server_that_adds_tokens(make_server, tmp_path):
    server = make_server()
    complete = server._complete
    server._complete = lambda body: complete({**body, "prompt": [1, *body["prompt"]]})
    with server.running() as url:
        assert "it tokenized it again" in refusal(url, tmp_path)


def test_a_server_that_does_not_say_what_it_read(make_server, tmp_path):
    with make_server(says_usage=False).running() as url:
        assert "without usage.prompt_tokens" in refusal(url, tmp_path)


def test_a_server_without_the_likeliest_tokens(make_server, tmp_path):
    with make_server(says_tops=False).running() as url:
        assert "which token is the likeliest" in refusal(url, tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        {"choices": []},
        {"choices": [None]},
        {"choices": [{"text": None}]},
        {"choices": [{"logprobs": {"token_logprobs": "none"}}]},
    ],
    ids=str,
)
def test_answers_in_an_unknown_form(make_server, tmp_path, broken):
    server = make_server()
    complete = server._complete

    def of_long_prompts(body):
        status, answer = complete(body)
        return status, {**answer, **broken} if len(body["prompt"]) > 190 else answer

    server._complete = of_long_prompts
    with server.running() as url:
        message = refusal(url, tmp_path, tasks=["rp_recall"])
    assert "unknown form" in message or "log-probabilities of 0 tokens" in message


@pytest.mark.parametrize("api", ["llama.cpp", "openai"])
def test_likelihoods_of_a_server_without_them(make_server, tmp_path, api):
    names = ["rp_recall", "rp_recall_ll", "rp_recall_mc", "perplexity", "rp_short_cloze"]
    settings = {"log_probs": "none"} if api == "openai" else {}
    with make_server(api=api, **settings).running() as url:
        message = refusal(url, tmp_path, tasks=names)
        alone = rope_patch.evaluate_server(
            url, TINY, out=tmp_path, **{**SMALL, "tasks": ["rp_recall"]}
        )
    assert message.startswith("rp_recall_ll, rp_recall_mc, rp_short_cloze, perplexity: expected")
    assert message.endswith("--tasks rp_recall")
    (entry,) = alone.results["retrieval"]
    assert {row["log_likelihood"] for row in entry["samples"]["served"]} == {None}
    assert {row["score"] for row in entry["samples"]["served"]} == {1.0}


def test_a_server_that_chats_only(tmp_path):
    def answer(handler):
        is_list = handler.path == "/v1/models"
        body = b'{"data": [{"id": "chat"}]}' if is_list else b'{"detail": "Not Found"}'
        handler.send_response(200 if is_list else 404)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with answering(answer) as url:
        assert "OpenAI's completions of a prompt of token ids" in refusal(url, tmp_path)


def test_what_is_no_engine_at_all(tmp_path):
    with fixed_answer(200, b"<html>") as url:
        assert "expected an engine's API" in refusal(url, tmp_path)


def test_a_served_request_names_what_is_wrong():
    for name in ("concurrency", "timeout", "tries"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            ServedRequest(tokenizer=TINY, **{name: 0})
