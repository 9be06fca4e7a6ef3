"""Test scores of answers against NVIDIA's published rules for RULER, written out here anew."""

import random

import pytest

from rope_patch import tasks
from rope_patch.evaluation.measures import lm_eval_tasks

OUTPUTS = 60  # made up for each sample
ANSWERED_BY_ANY = ("rp_qa_1", "rp_qa_2")  # all other tasks ask for every reference
CONTROL = [chr(code) for code in range(32)]


def clean(output):
    """RULER's scripts/eval/evaluate.py: a newline for every control character."""
    characters = ["\n" if ord(character) < 32 else character for character in output.strip()]
    return "".join(characters).strip()


def match_all(outputs, references):
    """RULER's string_match_all, in percent: the mean share of references that occur."""
    shares = []
    for output, expected in zip(outputs, references, strict=True):
        count = 0
        for reference in expected:
            count += clean(output).lower().find(reference.lower()) >= 0
        shares.append(count / len(expected))
    return round(100 * sum(shares) / len(shares), 2)


def match_part(outputs, references):
    """RULER's string_match_part, in percent: how often at least one reference occurs."""
    hits = 0
    for output, expected in zip(outputs, references, strict=True):
        hits += max(clean(output).lower().find(reference.lower()) >= 0 for reference in expected)
    return round(100 * hits / len(outputs), 2)


def made_up_output(answers, rng):
    """Return an answer as models write it: whole, in part, in another form, or wrong."""
    chosen = rng.sample(answers, rng.randint(0, len(answers)))
    pieces = []
    for answer in chosen:
        cut = rng.randrange(1, len(answer)) if len(answer) > 1 else 1
        control = rng.choice(CONTROL)
        pieces.append(
            rng.choice(
                [
                    answer,
                    answer,
                    answer.upper(),
                    answer.title(),
                    answer[:cut],
                    answer[cut:],
                    f"{answer[:cut]}{control}{answer[cut:]}",
                    f"{answer[:cut]} {answer[cut:]}",
                    f"{control}{answer}{control}",
                    f"x{answer}9",
                    answer[::-1],
                    str(rng.randint(10**6, 10**7)),
                ]
            )
        )
    separator = rng.choice([", ", " ", "\n", "", " and ", "\t", "\x00", "-"])
    before, after = rng.choice(["", "", " ", "The answer is ", "1. ", "\n\n"]), rng.choice(CONTROL)
    return f"{before}{separator.join(pieces)}{rng.choice(['', '.', after])}"


@pytest.mark.parametrize("name", tasks.groups()["rp_ruler"])
def test_scores_of_made_up_outputs_are_those_of_nvidias_rules(tokenizer, name):
    (task,) = lm_eval_tasks.build(name, tokenizer, [2048], 4, [10, 50, 90], per_text=2)
    rng = random.Random(name)
    rule = match_part if name in ANSWERED_BY_ANY else match_all
    outputs, references, scores = [], [], []
    for row in task.test_docs():
        whole = [", ".join(row["answers"]), "", row["target"].swapcase()]
        for output in whole + [made_up_output(row["answers"], rng) for _ in range(OUTPUTS)]:
            score = task.process_results(row, [output])["score"]
            assert round(100 * score, 2) == rule([output], [row["answers"]]), output
            outputs, references = [*outputs, output], [*references, row["answers"]]
            scores.append(score)
    assert round(100 * sum(scores) / len(scores), 2) == pytest.approx(
        rule(outputs, references), abs=0.011
    )
    # The outputs tell rules apart: all right, all wrong and, of several references, a part.
    assert {0.0, 1.0} <= set(scores)
    several = any(len(answers) > 1 for answers in references)
    assert (0 < min(set(scores) - {0.0}) < 1) == (several and rule is match_all)


def test_a_reference_that_a_control_character_splits_is_no_match():
    row = {"answers": ["12345", "ab cd"]}
    for name, of_two in (("rp_vt", 0.5), ("rp_qa_1", 1.0)):
        score = tasks.config(name)["process_results"]
        assert score(row, ["12\x0045 AB\ncd"])["score"] == 0
        assert score(row, ["\x0712345\x1f ab\tcd"])["score"] == of_two
