"""Test scores of answers, and that a settled score is final: no continuation changes it."""

import random
from difflib import SequenceMatcher

import pytest
from helpers.built_tasks import rows, score_of
from lm_eval.tasks.ruler.common_utils import string_match_all, string_match_part

from rope_patch import tasks
from rope_patch.tasks import settled_part, stop_rule

# --- RULER's: NVIDIA's published rules, written out here anew -------------------------------------

OUTPUTS = 30  # made up for each sample
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
def test_scores_of_made_up_outputs_are_those_of_nvidias_rules(name):
    rng = random.Random(name)
    rule = match_part if name in ANSWERED_BY_ANY else match_all
    outputs, references, scores = [], [], []
    for row in rows(name, length=2048, samples=4, per_text=2):
        whole = [", ".join(row["answers"]), "", row["target"].swapcase()]
        for output in whole + [made_up_output(row["answers"], rng) for _ in range(OUTPUTS)]:
            score = score_of(name, row, output)
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
        assert score_of(name, row, "12\x0045 AB\ncd") == 0
        assert score_of(name, row, "\x0712345\x1f ab\tcd") == of_two


@pytest.mark.parametrize("written", ["It is france.", "Spain", "in France", "The French Republic"])
def test_any_of_the_answers_scores_in_full_where_lm_eval_divides(written):
    """The shares are those of lm-eval, which for one answer is RULER's rule."""
    answers = ["France", "in France", "the French Republic"]
    alone = [string_match_part([written], [[answer]]) for answer in answers]
    assert score_of("rp_qa_1", {"answers": answers}, written) == max(alone)
    assert score_of("rp_vt", {"answers": answers}, written) == pytest.approx(sum(alone) / 3)
    assert string_match_all([written], [answers]) == pytest.approx(sum(alone) / 3)


# --- Each task's own ------------------------------------------------------------------------------

TARGET = "aB3dE6gH9k The keeper fed the pigeons. It rained."
REPLY = TARGET.split(" ", 1)[1]
SCORES = {  # of what is written, by task and target
    ("rp_copy", "one two three four"): {
        " one two three four five": 1,
        "one two three four": 1,
        "one two\nthree": 0.75,
        "one two 3 four": 0.5,
        "two three four": 0,
        "One two three four": 0,
        "": 0,
    },
    ("rp_count", "7"): {
        " seven.": 1,
        " Seven of them; then eight": 1,
        " eight of them; then seven": 0,
        " seventeen": 0,
        " seventy-seven": 0,
        " seventy seven": 0,
        " 7,5": 0,
        " 7, I think": 1,
        " 17": 0,
    },
    ("rp_count", "1"): {" 12.": 0, " 1,000": 0, " someone left none": 0, "": 0},
    ("rp_count", "10"): {"there were 10": 1},
    ("rp_icl", "37"): {" 37\nSentence:": 1, "It is 37.": 1, "73": 0, "3": 0, "": 0},
    ("rp_latent_list", "[1, 22, 3]"): {
        " [1, 22, 3]\nand so on [4]": 1,
        "[1,22,\n3]": 1,
        "[1, 22]": 0,
        "1, 22, 3": 0,
        "[11, 22, 3]": 0,
    },
    ("rp_latent_list", "12"): {
        " 12.": 1,
        " 12.5": 0,
        " 125": 0,
        "the number 12, as said": 1,
        " 2, or 12": 0,
        " [12]": 0,
        "": 0,
    },
    ("rp_graph_bfs", "[aaaaaaaa, bbbbbbbb]"): {  # the F1 of the set
        "[aaaaaaaa, bbbbbbbb]": 1,
        " [bbbbbbbb, aaaaaaaa] and then [cccccccc]": 1,
        "[AAAAAAAA,bbbbbbbb": 1,
        "aaaaaaaa, bbbbbbbb\ncccccccc": 1,
        "[aaaaaaaa]": 2 / 3,
        "[aaaaaaaa, cccccccc]": 1 / 2,
        "[aaaaaaaa, aaaaaaaa, bbbbbbbb, cccccccc, dddddddd]": 2 / 3,
        "[aaaaaaaabbbbbbbb]": 0,
        "[]": 0,
        "": 0,
    },
    ("rp_code", "read_file"): {
        " read_file": 1,
        " `read_file()`.": 1,
        "read_file, which": 1,
        "read_files": 0,
        "the read_file": 0,
        "Read_file": 0,
        "": 0,
    },
    ("rp_code_next", "x = read(y)"): {
        " x = read(y)\n    return x": 1,
        "\n```python\n    x = read(y)\n```": 1,
        " `x = read(y)`": 1,
        " `x = read(y)`. It reads y.": 1,
        " `x = read(z)`, not `x = read(y)`": 0,
        " x = read(y)  # comment": 0,
        " x = read(z)\n x = read(y)": 0,
        "": 0,
    },
    ("rp_mrcr_2", TARGET): {
        f" {TARGET}": 1,
        f"{TARGET}\n\nUser: Write a poem about kites.": 1,
        TARGET.replace(" ", "\n", 1): 1,
        TARGET.replace(" ", "", 1): 1,
        REPLY: 0,
        TARGET.lower(): 0,
        f"Here it is: {TARGET}": 0,
        "aB3dE6gH9k": 0,
        "": 0,
        **{
            f"aB3dE6gH9k {other}": SequenceMatcher(None, other, REPLY).ratio()
            for other in ("The keeper fed the owls. It rained.", f"{REPLY} And snowed.")
        },
    },
}


@pytest.mark.parametrize(
    ("name", "target", "written", "score"),
    [(*key, written, score) for key, scores in SCORES.items() for written, score in scores.items()],
)
def test_the_score_is_that_of_the_tasks_rule(name, target, written, score):
    doc = {"target": target, "answers": [target]}
    assert score_of(name, doc, written) == pytest.approx(score)


@pytest.mark.parametrize(
    "name", ["rp_copy", "rp_vt", "rp_qa_1", "rp_count", "rp_code", *tasks.groups()["rp_ruler2"]]
)
def test_the_likelihood_of_the_target_is_reported_if_the_model_gives_it(name):
    class Response(str):
        target_log_likelihood = -2.5

    doc = {"target": "one two", "answers": ["one two"]}
    scores = tasks.config(name)["process_results"](doc, [Response("one")])
    assert scores["target_log_likelihood"] == -2.5


# --- Settled scores -------------------------------------------------------------------------------

NODE, OTHER = "0123abcd", "89ef4567"
SETTLED = {  # a task of each rule: the references, the target, pieces of right and wrong answers
    "rp_vt": (["12", "Ab"], "12 Ab", ["12", "ab", "1", "x"]),
    "rp_qa_1": (["12", "Ab"], "12", ["12", "ab", "1", "x"]),
    "rp_count": (
        ["7"],
        "seven",
        ["7", "7.5", "8", "seven", "seventeen", "twenty-", "one", "teen", "-", "no", ","],
    ),
    "rp_code": (["join"], "join", ["join", "`", "()", "split", "jo", "."]),
    "rp_code_next": (
        ["x = 1"],
        "x = 1",
        ["x", "=", "1", "\n", "```", "```python", "`x = 1`", "`"],
    ),
    "rp_copy": (["a bc d"], "a bc d", ["a", "b", "bc", "c", "d", "a bc d"]),
    "rp_graph_bfs": ([NODE], f"[{NODE}, {OTHER}]", [NODE, OTHER, "[", "]", ", ", "\n"]),
    "rp_latent_list": (["[1, 2]"], "[1, 2]", ["[1, 2]", "[", "]", "1", "2", "-", ".", ", "]),
    "rp_mrcr_2": (["QX the reply"], "QX the reply", ["QX", "Q", "the", "reply", "\n", "re"]),
    "rp_oolong_count": (["12"], "12", ["12", "1", "3", ":", "\n", "**"]),
    "rp_oolong_topic": (["law"], "law", ["law", "school", "topic:", "\n", "[", "]"]),
    "rp_oolong_date": (["2023-07-01"], "2023-07-01", ["2023-07-01", "2023", "-07", "1", "\n"]),
    "rp_oolong_spells": (["A B", "C"], "A B, C", ["A B", "C", ",", "\\boxed{", "}", "\n"]),
}


@pytest.mark.parametrize("name", SETTLED)
def test_no_continuation_changes_a_settled_score(name):
    """Texts are random pieces of right and wrong answers; some are settled before their end."""
    answers, target, pieces = SETTLED[name]
    doc, score = {"answers": answers, "target": target}, tasks.config(name)["process_results"]
    rule, rng = stop_rule(score), random.Random(0)
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
    assert early[0.0] > 20 or name in ("rp_vt", "rp_qa_1")


def test_every_scoring_of_generated_answers_has_a_rule_of_its_own():
    """RULER's search for all answers has the rule for functions that are not listed.

    Those of RULERv2 share one that never stops.
    """
    generated = [tasks.config(name) for name in tasks.names()]
    functions = {
        config["process_results"]
        for config in generated
        if config["output_type"] == "generate_until"
    }
    open_ends = {tasks.config(name)["process_results"] for name in tasks.groups()["rp_ruler2"]}
    assert functions - open_ends == {tasks.config(name)["process_results"] for name in SETTLED}
    # The four of OOLONG's tasks read the first line alone.
    assert len({stop_rule(function) for function in functions}) == len(SETTLED) - 2


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
    assert settled_part(text, stops) == expected
