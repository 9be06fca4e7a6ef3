"""Test `check_method`: built-in methods pass, and each wrong one is named with what is wrong."""

import json
import math
import re
from dataclasses import dataclass, replace

import pytest
from helpers.commands import run_in_this_process

import rope_patch
from rope_patch.methods import Frequencies, Region, find_method, registered_methods

STRETCHES = [1 + 0.4 * pair for pair in range(8)]
# Options for a model that was trained on 64 tokens, where a method needs some.
OPTIONS = {
    "longrope": {"long_factor": STRETCHES},
    "mixed-longrope": {"long_factor": STRETCHES},
    "proportional": {"partial_rotary_factor": 0.5},
    "string": {"local": 8},
    "dpe": {"groups": [2, 3, 4, 5]},
}


@pytest.mark.parametrize("name", [name for name in registered_methods() if name != "default"])
def test_our_methods_pass(name):
    proof = rope_patch.check_method(name, **OPTIONS.get(name, {}))
    assert proof.is_ok, proof.as_text()


@pytest.mark.parametrize(
    "options", [{"start_tokens": 4, "short_factor": STRETCHES}, {"short_factor": STRETCHES}]
)
def test_a_stretched_short_set_is_no_fault(options):
    options = {**OPTIONS["longrope"], **options}
    assert rope_patch.check_method("longrope", factor=4, **options).is_ok


def test_what_changes_nothing_is_refused():
    with pytest.raises(rope_patch.Refused, match="nothing"):
        rope_patch.check_method("default")
    with pytest.raises(rope_patch.Refused, match="did you mean"):
        rope_patch.check_method("yran")


def not_finite(base):
    def frequencies(self, geometry, seq_len=None):
        inv_freq = geometry.inv_freq() / self.factor
        inv_freq[3] = math.nan
        return Frequencies(inv_freq)

    return {"frequencies": frequencies}


def stretched_start(base):
    """Stretch short texts, although the method follows the length."""
    return {"factor_at": None, "frequencies": lambda self, g, n=None: Frequencies(g.inv_freq() / 2)}


def restless(base):
    """Say that frequencies hold for ten tokens more than they do."""
    return {
        "valid_until": lambda self, length, trained: length + 10.0,
        "frequencies_at": lambda self, g, n: Frequencies(g.inv_freq() / (1 + n / 64)),
    }


def falling(base):
    return {"valid_until": lambda self, length, trained: 64.0 if length != 100 else 99.0}


def looking_ahead(base):
    def map_regions(self, *arguments):
        near, far = base.map_regions(self, *arguments)
        return [replace(near, stop=near.stop + 1), far]

    return {"map_regions": map_regions}


def by_chunk(base):
    """Choose the window by the last query of a pass."""

    def map_regions(self, queries, keys, reach, last_query):
        window = 4 + last_query % 16
        return base.map_regions(replace(self, window=window), queries, keys, reach, last_query)

    return {"map_regions": map_regions}


def beyond_reach(base):
    def map_regions(self, queries, keys, reach, last_query):
        near, far = base.map_regions(self, queries, keys, reach, last_query)
        return [near, replace(far, query_shift=far.query_shift + reach)]

    return {"map_regions": map_regions}


def twice(base):
    def map_regions(self, queries, keys, reach, last_query):
        near, far = base.map_regions(self, queries, keys, reach, last_query)
        return [near, far, Region(start=near.start, stop=near.start + 1)]

    return {"map_regions": map_regions}


WRONG = [
    (not_finite, "linear", {"finite": "got nan for pair 3 at 1 tokens"}),
    (stretched_start, "dynamic-linear", {"not stretched": "up to 64 tokens, got others at 1"}),
    (restless, "dynamic-linear", {"the same up to": "from 1 tokens to 11, got others at"}),
    (falling, "dynamic-linear", {"never falls": r"valid_until\(65\) to be at least 65, got 64"}),
    (
        looking_ahead,
        "rerope",
        {
            "up to its own": "query 64 to meet keys up to 64, got key 65",
            "later tokens change nothing": "logits are off by",
        },
    ),
    (
        by_chunk,
        "rerope",
        {
            "alike in every chunk": "in a chunk of the queries from",
            "cached chunks equal one pass": "logits are off by",
        },
    ),
    (beyond_reach, "rerope", {"within reach": "from 0 to below 64, .* got 80 between query 64"}),
    (twice, "rerope", {"at most once": "once, got it in 2 regions"}),
]


@pytest.fixture
def wrong(own_registry):
    """Register a method that a change makes wrong."""

    def register(change, base_name):
        base = find_method(base_name)
        made = dataclass(frozen=True, kw_only=True)(
            type("Wrong", (base,), {"__doc__": "Wrong.", "__module__": __name__, **change(base)})
        )
        rope_patch.register_method("wrong", paper="nobody, 2026", training="needed")(made)

    return register


@pytest.mark.parametrize(("change", "base", "facts"), WRONG)
def test_what_is_wrong_is_named(wrong, change, base, facts):
    wrong(change, base)
    proof = rope_patch.check_method("wrong")
    assert not proof.is_ok
    (kind,) = proof.kinds
    for rule, fact in facts.items():
        (failure,) = [each for each in kind.failures if rule in each]
        assert re.search(fact, failure), failure


def test_the_command_prints_the_proof_and_its_exit_code_is_the_verdict(wrong):
    passed = run_in_this_process("methods", "yarn", "--check", "--factor", "2")
    assert passed.returncode == 0
    assert "cached chunks equal one pass" in passed.stdout
    wrong(looking_ahead, "rerope")
    result = run_in_this_process("methods", "wrong", "--check", "--json")
    assert result.returncode == 1
    data = json.loads(result.stdout)
    assert data["ok"] is False
    assert any("key 65" in check["problem"] for check in data["kinds"][0]["checks"])
