"""Test that a settled score is final: no continuation of the text gives another one."""

import random

import pytest

from rope_patch import tasks
from rope_patch.tasks import (
    copying,
    dialogues,
    graphs,
    list_operations,
    scoring,
    settled,
    standard_library,
)

NODE, OTHER = "0123abcd", "89ef4567"
RULES = {
    scoring.all_answers: ({"answers": ["12", "Ab"]}, ["12", "ab", "1", "x"]),
    scoring.any_answer: ({"answers": ["12", "Ab"]}, ["12", "ab", "1", "x"]),
    scoring.first_number: (
        {"answers": ["7"]},
        ["7", "7.5", "8", "seven", "seventeen", "twenty-", "one", "teen", "-", "no", ","],
    ),
    standard_library.same_name: (
        {"answers": ["join"], "target": "join"},
        ["join", "`", "()", "split", "jo", "."],
    ),
    standard_library.same_line: (
        {"answers": ["x = 1"], "target": "x = 1"},
        ["x", "=", "1", "\n", "```", "```python", "`x = 1`", "`"],
    ),
    copying.copied: (
        {"answers": ["a bc d"], "target": "a bc d"},
        ["a", "b", "bc", "c", "d", "a bc d"],
    ),
    graphs.node_f1: (
        {"answers": [NODE], "target": f"[{NODE}, {OTHER}]"},
        [NODE, OTHER, "[", "]", ", ", "\n"],
    ),
    list_operations.same_value: (
        {"answers": ["[1, 2]"], "target": "[1, 2]"},
        ["[1, 2]", "[", "]", "1", "2", "-", ".", ", "],
    ),
    dialogues.repeated: (
        {"answers": ["QX the reply"], "target": "QX the reply"},
        ["QX", "Q", "the", "reply", "\n", "re"],
    ),
}


@pytest.mark.parametrize("score", RULES, ids=lambda score: score.__name__)
def test_no_continuation_changes_a_settled_score(score):
    """Texts are random pieces of right and wrong answers; some are settled before their end."""
    doc, pieces = RULES[score]
    rule, rng = settled.rule_of(score), random.Random(0)
    separators, early = ["", "", " ", " ", "\n"], {0.0: 0, 1.0: 0}
    for _ in range(3000):
        parts = [rng.choice(pieces) + rng.choice(separators) for _ in range(rng.randint(1, 7))]
        text = "".join(parts)
        final = score(doc, [text])["score"]
        for end in range(len(text)):
            if rule(doc, text[:end]):
                assert score(doc, [text[:end]])["score"] == final, (text[:end], text)
                early[float(final == 1)] += 1
                break
    assert early[1.0] > 0  # right answers, and for all rules but RULER's two wrong ones
    assert early[0.0] > 20 or score in (scoring.all_answers, scoring.any_answer)


def test_every_scoring_of_generated_answers_has_a_rule_of_its_own():
    """RULER's `all_answers` has the rule for functions that are not listed."""
    generated = [tasks.config(name) for name in tasks.names()]
    functions = {
        config["process_results"]
        for config in generated
        if config["output_type"] == "generate_until"
    }
    own = [settled.rule_of(function) for function in functions]
    assert functions == set(RULES)
    assert len(set(own)) == len(functions)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("seven", (), "seven"),
        ("seven\ufffd\ufffd", (), "seven"),  # the first bytes of a character
        ("reply\nUs", ("\nUser:", "."), "reply"),  # the stop may come to its end, and is cut off
        ("reply\nus", ("\nUser:",), "reply\nus"),
    ],
)
def test_an_end_that_the_next_token_may_change_decides_nothing(text, stops, expected):
    assert settled.decided_part(text, stops) == expected
