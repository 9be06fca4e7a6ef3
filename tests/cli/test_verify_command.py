"""Test `rope-patch verify`: text, JSON, exit codes."""

import json

import pytest
from helpers.commands import run_in_this_process
from helpers.engine_server import EngineServer
from helpers.wrong_engines import ASSETS, CONFIGS, configured, plain

TINY = ASSETS / "tiny-llama"
YARN = ("--against", TINY, "--method", "yarn", "--factor", 4)


@pytest.mark.parametrize(("case", "code"), [("as asked", 0), ("attention factor dropped", 1)])
def test_exit_code_and_json(case, code):
    parameters, expected = CONFIGS[case]
    with EngineServer(configured("llama", parameters)).running() as url:
        result = run_in_this_process("verify", url, *YARN, "--json", "-q")
    assert result.returncode == code
    found = json.loads(result.stdout)
    assert found["explains"] == [expected]
    assert found["margin_nats"] > 100
    assert found["noise_floor_nats"] < 1e-3
    assert {"name", "says", "nats_a_token", "margin_nats", "explains"} == found["hypotheses"][
        0
    ].keys()


def test_text_names_the_rotation_the_margin_and_the_noise_floor():
    with EngineServer(plain()).running() as url:
        result = run_in_this_process("verify", url, *YARN)
    assert result.returncode == 1
    first, second = result.stdout.splitlines()[:2]
    assert first.endswith(
        "does not rotate as asked (yarn ×4, 256 → 1,024 tokens): it rotates by theta alone: no "
        "scaling acts"
    )
    assert "margin: " in second
    assert "noise floor: " in second


def test_what_cannot_be_told_exits_with_2():
    with EngineServer(plain()).running() as url:
        words = ("--against", TINY, "--method", "dynamic-yarn", "--tokens", 200)
        result = run_in_this_process("verify", url, *words)
    assert result.returncode == 2
    assert "cannot be told apart" in result.stdout


@pytest.mark.parametrize(
    "words", [("http://127.0.0.1:9", *YARN), ("http://127.0.0.1:9", "--against", "no/such/folder")]
)
def test_errors_exit_with_2_because_1_is_a_verdict(words):
    result = run_in_this_process("verify", *words)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
