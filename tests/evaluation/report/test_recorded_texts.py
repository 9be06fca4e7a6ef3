"""Compare a report's sentences with recorded ones: each kind of result, and a whole report.

What the numbers in them are is tested beside this file; here, that no sentence claims more than
its results can, which a person judges in the diff of `recorded/`.
"""

import math
from pathlib import Path

import pytest
from helpers.recorded import check_recorded
from helpers.report_results import LENGTHS, many, method, results, samples

from rope_patch.evaluation import (
    Ranking,
    RunStatistics,
    conclude,
    summary_cautions,
    summary_sentences,
    write_report,
)

RECORDED = Path(__file__).with_name("recorded")
UNPRICED = {"perplexity": None, "short": [], "cost": {}}
USABLE, HALF, FAILING = (1.0, 1.0), (1.0, 0.5), (1.0, 0.0)


def asked(chances, count=100, **parts):
    """Return an evaluation of one task alone, right with these chances within and beyond."""
    measured = results() | UNPRICED | {"control": []} | parts
    known = {entry["label"]: entry for entry in measured["methods"]}
    of = {
        label: samples("rp_vt", pair, count=count, depths=(None,))
        for label, pair in chances.items()
    }
    for rows in of.values():
        for number, row in enumerate(rows):
            row["text"] = number % count
    task = {"task": "rp_vt", "lengths": list(LENGTHS), "samples": of}
    methods = [known.get(label) or method(label) for label in chances]
    return measured | {"methods": methods, "retrieval": [task]}


def with_price(chances, **options):
    """Return an evaluation of one task, and of perplexity and short tasks."""
    whole = results()
    parts = {name: whole[name] for name in ("perplexity", "short")}
    return asked(chances, **parts, **options)


def moved(measured, nats, label="yarn ×2"):
    """Add to the log-likelihood of a method's answers what a function says of their number."""
    for number, row in enumerate(measured["retrieval"][0]["samples"][label]):
        row["log_likelihood"] += nats(number)
    return measured


def unlikely(measured):
    """Leave out the likelihoods of answers."""
    for rows in measured["retrieval"][0]["samples"].values():
        for row in rows:
            row["log_likelihood"] = None
    return measured


def trained_on(length):
    measured = results()
    return measured | {"run": measured["run"] | {"trained_length": length}}


def not_told_apart():
    labels = ("none", "yarn ×2", "linear ×2")
    measured = asked(dict.fromkeys(labels, (0.0, 0.0)), count=12)
    moved(measured, lambda number: 4.0 + number % 2)
    return moved(measured, lambda number: 4.9 - number % 2, "linear ×2")


def many_worse():
    measured = asked(
        {"none": FAILING, "yarn ×2": USABLE} | {f"linear ×{n}": FAILING for n in range(2, 7)}
    )
    for n in range(2, 7):
        moved(measured, lambda _, n=n: 2 - n, f"linear ×{n}")
    return measured


def guessed():
    measured = results() | UNPRICED
    rows = samples("rp_niah_single_1", USABLE, lengths=(2048,), count=12)
    measured["control"][0]["samples"] = {"none": rows}
    return measured


def by_heart():
    """Return two tasks with one chance in four, of which one is answered without its text."""
    measured = guessed()
    for task, pair in (("rp_code_mc", HALF), ("rp_qa_1_mc", (0.25, 0.25))):
        rows = samples(task, pair, lengths=(2048,))
        closed = {"task": task, "kind": "closed book", "lengths": [2048], "depths": [10, 50, 90]}
        closed["samples"] = {"none": [row | {"chance": 0.25} for row in rows]}
        measured["control"].append(closed)
    return measured


def guessed_without_likelihoods():
    measured = unlikely(asked({"none": FAILING, "yarn ×2": USABLE}))
    rows = samples("rp_vt", USABLE, lengths=(2048,), count=12)
    control = {"task": "rp_vt", "lengths": [2048], "depths": [], "samples": {"none": rows}}
    return measured | {"control": [control]}


def likely_without_the_text():
    measured = results() | UNPRICED
    for row in measured["control"][0]["samples"]["none"]:
        row["log_likelihood"] = -1.0
    return measured


def failed():
    measured = asked({"none": FAILING, "yarn ×2": USABLE})
    for row in measured["retrieval"][0]["samples"]["yarn ×2"][:7]:
        row |= {"score": None, "error": "out of memory"}
    return measured


def infinite(value):
    measured = results() | {"retrieval": []}
    for document in measured["perplexity"]["losses"]["none"]:
        document[-1] = value
    return measured


RESULTS = {
    "a usable method": lambda: with_price({"none": FAILING, "yarn ×2": USABLE}),
    "the best of two": lambda: asked({"none": FAILING, "yarn ×2": USABLE, "linear ×2": HALF}),
    "likelier answers, not shown to be usable": results,
    "two methods that are not told apart": not_told_apart,
    "many methods": many_worse,
    "a method that changes nothing": lambda: asked({"none": FAILING, "yarn ×2": FAILING}),
    "few texts": lambda: asked({"none": FAILING, "yarn ×2": (0.5, 0.5)}, count=4),
    "few texts, all right": lambda: asked({"none": FAILING, "yarn ×2": USABLE}, count=5),
    "texts that differ": lambda: moved(
        asked({"none": (0.5, 0.5), "yarn ×2": (0.5, 0.5)}, count=12),
        lambda number: 1.5 if number % 3 else -2.0,
    ),
    "few texts, the plain model leads": lambda: asked(
        {"none": USABLE, "yarn ×2": (0.5, 0.5)}, count=4
    ),
    "a worse method": lambda: moved(
        asked({"none": FAILING, "yarn ×2": FAILING}), lambda number: -2 - number % 2
    ),
    "answers as likely without their text": likely_without_the_text,
    "no likelihoods, nothing kept": lambda: unlikely(asked({"none": FAILING, "yarn ×2": FAILING})),
    "no likelihoods, 85% kept": lambda: unlikely(asked({"none": FAILING, "yarn ×2": (1.0, 0.85)})),
    "perplexity alone": lambda: results() | {"retrieval": [], "control": []},
    "infinite losses": lambda: infinite(math.inf),
    "no plain model": lambda: asked({"yarn ×2": USABLE}),
    "the plain model alone": lambda: asked({"none": FAILING}),
    "nothing beyond the trained length": lambda: trained_on(32768),
    "nothing": lambda: results() | UNPRICED | {"control": [], "retrieval": []},
    "questions that can be guessed": guessed,
    "questions that can be guessed, no likelihoods": guessed_without_likelihoods,
    "questions that can be answered without the text": by_heart,
    "failed samples": failed,
}


def paragraphs(measured):
    stats = RunStatistics(measured)
    said = conclude(stats, Ranking(stats))
    yield from filter(None, (said.headline, said.details))
    yield from (f"- {sentence}" for sentence in summary_sentences(stats))
    yield from (f"- Caution: {sentence}" for sentence in summary_cautions(stats))


def test_sentences_of_each_kind_of_result():
    lines = ["# A report's sentences, by kind of result"]
    for title, make in RESULTS.items():
        lines += ["", f"## {title}", "", *paragraphs(make())]
    check_recorded("\n".join(lines) + "\n", RECORDED / "sentences.md")


def test_headlines_have_at_most_14_words():
    for make in RESULTS.values():
        stats = RunStatistics(make())
        assert len(conclude(stats, Ranking(stats)).headline.split()) <= 14


def test_losses_that_come_back_from_json_are_infinite_too():
    assert [*paragraphs(infinite("Infinity"))] == [*paragraphs(infinite(math.inf))]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("measured", [results, many])
def test_a_whole_report_and_what_a_terminal_shows_of_it(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # as wide as a terminal that does not say
    shown = []
    write_report(measured(), tmp_path, shown.append)
    check_recorded("".join(shown) + "\n", RECORDED / f"{measured.__name__}.txt")
    if measured is results:
        report = (tmp_path / "report.md").read_text(encoding="utf-8")
        check_recorded(report, RECORDED / "results.md")
