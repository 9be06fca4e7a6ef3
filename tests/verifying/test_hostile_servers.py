"""Test servers that are no engine: redirects, dripping, garbage, deep JSON, hostile names."""

import contextlib
import json
import time

import pytest
from helpers.commands import run_in_this_process
from helpers.engine_server import EngineServer, answering
from helpers.wrong_engines import ASSETS, FACTOR, YARN, configured

import rope_patch
from rope_patch.verifying import CannotReach, CannotVerify, HttpError, JsonClient

TINY = ASSETS / "tiny-llama"
KEY = "sk-secret"


def send(handler, body=b"{}", status=200, **headers):
    handler.send_response(status)
    for name, value in {"Content-Length": len(body), **headers}.items():
        handler.send_header(name, str(value))
    handler.end_headers()
    handler.wfile.write(body)


def drip_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    drip(handler)


def drip(handler):
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


HOSTILE = {
    "garbage": (lambda h: h.wfile.write(b"garbage garbage\r\n\r\n"), "does not speak HTTP"),
    "nothing": (lambda h: None, "no server answers"),
    "deep": (lambda h: send(h, b"[" * 200_000), "answered no JSON"),
    "no JSON": (lambda h: send(h, b"\x1b[31mred"), "answered no JSON"),
    "cut": (lambda h: send(h, **{"Content-Length": 1000}), "no model"),
    "file": (lambda h: send(h, b"", 302, Location="file:///etc/passwd"), "answered 302"),
    "a loop": (lambda h: send(h, b"", 302, Location=h.path), "answered 302"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_that_is_no_engine_is_an_error_and_no_verdict(name):
    answer, message = HOSTILE[name]
    with answering(answer) as url:
        result = run_in_this_process("verify", url, "--against", TINY, "--engine", "openai")
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert line.isprintable()


@pytest.mark.parametrize("path", ["/", "/v1/models"])
def test_the_key_goes_to_the_server_that_was_named_alone(path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    seen = []

    def other(handler):
        seen.append(handler.headers.get("Authorization"))
        send(handler, b'{"other": 1}')

    with answering(other) as other_url:

        def first(handler):
            assert handler.headers["Authorization"] == f"Bearer {KEY}"
            if handler.path == "/inside":
                send(handler, b'{"inside": 1}')
            else:
                is_root = handler.path == "/"
                send(handler, b"", 302, Location="/inside" if is_root else other_url + "/x")

        with answering(first) as url:
            client = JsonClient(url, 10.0)
            if path == "/":
                assert client.get("/") == {"inside": 1}
            else:
                with pytest.raises(CannotVerify, match="another server"):
                    client.get(path)
    assert seen == []


@pytest.mark.parametrize("answer", [drip_body, drip], ids=["body", "status line"])
def test_a_server_that_drips_bytes_meets_the_deadline(answer):
    with answering(answer) as url:
        started = time.monotonic()
        with pytest.raises(CannotReach, match=r"0\.4 s"):
            JsonClient(url, 0.4).get("/")
        assert time.monotonic() - started < 2


def test_the_budget_is_that_of_all_answers_together():
    def slow(handler):
        time.sleep(0.3)
        send(handler)

    with answering(slow) as url:
        client = JsonClient(url, 0.5)
        assert client.get("/") == {}
        with pytest.raises(CannotReach, match=r"0\.5 s"):
            client.get("/")


def test_an_errors_body_may_drip_or_be_cut():
    def fail(handler):
        send(handler, b'{"error": {"message": "no\\nway"}}', 500)

    with answering(fail) as url, pytest.raises(HttpError, match="answered 500: no way"):
        JsonClient(url, 5.0).get("/")


def test_an_empty_key_is_no_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    seen = []
    with answering(lambda h: seen.append(h.headers.get("Authorization")) or send(h)) as url:
        JsonClient(url, 5.0, api_key="").get("/")
    assert seen == [None]


@pytest.mark.parametrize("key", ["sk-\nX-Evil: 1", "sk-\u2014"])
def test_a_key_that_no_header_can_hold_is_refused_without_printing_it(key):
    with pytest.raises(CannotVerify, match="HTTP header") as error:
        JsonClient("http://localhost:1", 5.0, api_key=key)
    assert "sk-" not in str(error.value)


@pytest.mark.parametrize("url", ["http://[", "http://host:port", "ftp://host", "file:///etc"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(CannotVerify, match="address"):
        JsonClient(url)


class StallingServer(EngineServer):
    """An engine that answers some requests; by the next one's end, a minute has gone by."""

    answered = 22  # of 25 that a whole verification asks, the last 6 about prompts
    lost = 0.0  # seconds

    def answer(self, path, body):
        if len(self.requests) == self.answered:
            self.lost = 60.0
            raise ConnectionAbortedError
        return super().answer(path, body)


def test_the_deadline_amid_an_answer_leaves_the_verdict_of_those_before_it(monkeypatch):
    server, monotonic = StallingServer(configured("llama", YARN)), time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: monotonic() + server.lost)
    with server.running() as url:
        asked = {"method": "yarn", "factor": FACTOR, "progress": False}
        result = rope_patch.verify(url, against=TINY, seconds=60.0, **asked)
    assert server.lost
    assert 0 < result.prompts < 6
    assert "as-asked" in result.verdict.explains


def test_a_served_name_cannot_write_to_the_terminal():
    name = "\x1b[31mEVIL\x07\n\nPASS as asked"

    def serve(handler):
        if handler.path == "/v1/models":
            send(handler, json.dumps({"data": [{"id": name}]}).encode())
        else:
            send(handler, b"{}", 404)

    with answering(serve) as url, contextlib.ExitStack():
        result = run_in_this_process("verify", url, "--against", TINY, "--engine", "openai")
    assert result.returncode == 2
    assert all(line.isprintable() for line in (result.stdout + result.stderr).splitlines())
    assert "PASS as asked" not in result.stderr.splitlines()
