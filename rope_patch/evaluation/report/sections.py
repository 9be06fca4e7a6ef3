"""The sections of one run's report: headings, notes, figures and tables, for HTML and Markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from rope_patch import tasks
from rope_patch.evaluation.report import agreement, figures
from rope_patch.evaluation.report import tables as report_tables
from rope_patch.evaluation.report.conclusions import MAX_ROWS, Ranking, find_gaps
from rope_patch.evaluation.report.figures import Picture
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.summary import summary_cautions, summary_sentences
from rope_patch.evaluation.report.table import Table, filter_mark, one_line
from rope_patch.tasks import CHOICE, LIKELIHOOD

_ACCURACY = (
    "Each cell is the mean score of its samples with its 95% Wilson interval; samples that share a "
    "text count as the cluster that they are. "
    f"{report_tables.BETTER} and {report_tables.WORSE}: better and worse than the plain "
    "model on the same samples (McNemar, or sign flips of texts; p < 0.05 after Holm); "
    f"{report_tables.BEST}: each other method is shown to be worse. The family is the methods, "
    "by the mean over tasks at the longest length; nothing else in the table is tested."
)
_LIKELIHOOD = (
    f"Tasks that end in {LIKELIHOOD} cost one forward pass a sample: right is where greedy "
    "decoding would begin with the answer."
)
_CHOICE_NOTE = (
    f"Tasks that end in {CHOICE} choose the likeliest of the answers to all questions that a text "
    "is asked: chance is one in as many."
)
_RETENTION = (
    "Retention is accuracy over the plain model's at the shortest length, both above guessing. "
    f"{report_tables.PASSED}: the interval's lower end is at least {THRESHOLD:.0%}; 100% is as "
    "good as the reference or better. The usable length is the longest up to which the isotonic "
    f"fit (a curve that never rises) is at least {THRESHOLD:.0%}. Its interval reaches from the "
    f"longest length that is {report_tables.PASSED} with every shorter one to the shortest that "
    f"is shown to be below {THRESHOLD:.0%}."
)
_HEAT = (
    "Depth is where the answer stands, in percent of the text. Cells show right answers of all "
    "samples with their 95% interval."
)
_FEW = "With fewer than 10 samples a cell, this proves that it can happen, not how often it does."
_CURVES = (
    "Each point is one window of {window:,} tokens of {texts}, every token given all the text "
    "before it; lower is better."
)
_CONTROL = (
    "The control is the plain model on the same tokens, given only the last {context:,} before "
    "them: what cutting the text gets you. A patch that does no better gains nothing there."
)
_SHORT_CONTROL = " The second control has {context:,}; no method is compared with it."
_LENGTH_DEPENDENT = (
    "{names}: the rotation follows the length, so the text's first {trained:,} tokens are read by "
    "themselves, as a text that ends there, and the rest in one pass as the whole length asks for; "
    "the picture of stretches shows it at the longest length."
)
_KEY_TOKENS = (
    "Key tokens are those whose loss by {evaluator} falls with context beyond {context:,} tokens "
    "(LongPPL, arXiv:2410.23771): the rest of a text says little about far context."
)
_SLIDING = (
    "The same tokens at every length, in strides of {stride:,}, each given the context before them "
    "that the length leaves: what a longer context is worth."
)
_ANSWERS = (
    "How likely the right answers are, given the prompt: this moves before accuracy does. 0 nats a "
    "token is certain, 0.69 is one in two, 2.3 is one in ten. The floor is the plain model's loss "
    "where the answer is not in the text."
)
_STRETCH = (
    "How many times slower each rotated pair turns, by the tokens that one turn took in training. "
    "Pairs with a wavelength beyond the trained length never completed a turn there."
)
_SHORT = (
    "The same samples under every method; * marks a difference from the plain model over all tasks "
    "with p < 0.05 (McNemar, after Holm over the methods); single tasks are not tested. Perplexity "
    "is compared block by block."
)
_HARNESS = (
    "Tasks of lm-eval and your own, whose samples have lengths of their own; * marks a difference "
    "from the plain model on the same samples with p < 0.05 (McNemar, or sign flips of scores "
    "between 0 and 1), or a ratio of perplexities whose 95% bootstrap interval over documents is "
    "without 1."
)
_AGREEMENT = (
    "The same samples, asked of a server and of the methods in this process. One rotation in two "
    "engines differs by rounding alone. Methods that follow the length may differ by design: a "
    "server may count the room for an answer from the first token on, and reads a document whole, "
    "whose first tokens are read by themselves here."
)
_COST = (
    "Ratios are medians of times measured in turns, with the smallest and the largest of the "
    "repeats, which are too few for an interval."
)
_TIMES = "Time and memory"
_CONTROLS = "What must fail for the rest to mean something:"
_FAR = "the plain model beyond its trained length, and"
_UNANSWERABLE = (
    "questions whose text lacks the answer, or that come without a text. Whoever answers them "
    "guesses, or knows the answer by heart."
)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """One task's heat maps, a table for each method whose depths or lengths differ.

    `shown` and `folded` are those before the fold and behind it, where all are if each cell is a
    single sample. `picture` is empty then.
    """

    task: str
    note: str
    picture: str
    mark: str
    tables: list[Table]
    lines: list[str]

    @property
    def shown(self) -> list[Table]:
        """Return the maps before the fold."""
        return self.tables[:MAX_ROWS] if self.picture else []

    @property
    def fold_text(self) -> str:
        """Return what the fold is called."""
        count = len(self.folded)
        return f"{count} more" if self.shown else f"{count} maps of single samples"

    @property
    def folded(self) -> list[Table]:
        """Return the maps behind the fold."""
        return self.tables[len(self.shown) :]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section."""

    heading: str
    notes: list[str] = field(default_factory=list)
    picture: Picture | None = None
    tables: list[Table] = field(default_factory=list)
    heat_maps: list[HeatMap] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was measured for the section."""
        return not (self.picture or self.tables or self.heat_maps or self.lines)


def sections(
    stats: RunStatistics, ranking: Ranking, pictures: dict[str, Picture], prefix: str = ""
) -> list[Section]:
    """Return the sections of what was measured, in order, for below the first screen.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
        pictures: From `figures.draw_figures`.
        prefix: Begins the file names of heat maps.
    """
    retention = _if_any(report_tables.retention_table(stats), report_tables.usable_table(stats))
    prices = _if_any(report_tables.short_table(stats))
    harness = _if_any(report_tables.harness_table(stats))
    answers = _if_any(report_tables.answer_table(stats))
    costs, controls = report_tables.cost_table(stats), report_tables.control_table(stats)
    failed = [one_line(line) for line in stats.run.get("failed") or []]
    chance = _if_any(report_tables.chance_text(stats))
    doubts = summary_cautions(stats)
    parts = [
        Section(heading=f"Cautions ({len(doubts)})", lines=doubts),
        Section(
            heading="Differences, intervals and tests", lines=summary_sentences(stats, ranking)
        ),
        Section(
            heading="Likelihood of the right answers",
            notes=[_ANSWERS],
            picture=pictures.get("answers"),
            tables=answers,
        ),
        Section(heading="Retention and usable length", notes=[_RETENTION], tables=retention),
        Section(
            heading="Question by question",
            notes=[_AGREEMENT],
            tables=_if_any(agreement.agreement_table(stats)),
            lines=list(agreement.agreement_lines(stats)),
        ),
        _accuracy_section(stats, pictures),
        Section(
            heading="Accuracy by depth",
            notes=_heat_notes(stats),
            heat_maps=_heat_maps(stats, ranking, prefix),
        ),
        _perplexity_section(stats, pictures),
        _key_tokens_section(stats),
        _sliding_section(stats, pictures),
        Section(
            heading="What the methods change", notes=[_STRETCH], picture=pictures.get("stretch")
        ),
        Section(heading="The price at short context", notes=[_SHORT, *chance], tables=prices),
        Section(heading="Other tasks", notes=[_HARNESS], tables=harness),
        Section(heading=_TIMES, notes=[_COST], tables=_if_any(costs)),
        Section(
            heading="Controls",
            notes=[" ".join([_CONTROLS, *([] if stats.is_served else [_FAR]), _UNANSWERABLE])],
            tables=_if_any(controls),
        ),
        Section(
            heading="Samples that failed", lines=[*report_tables.failure_lines(stats), *failed]
        ),
        Section(heading="Not run", lines=find_gaps(stats.results)),
    ]
    return [
        replace(
            part,
            notes=[note.replace("plain model", stats.plain_name) for note in part.notes],
            tables=[ranking.arrange(table, merge=part.heading != _TIMES) for table in part.tables],
        )
        for part in parts
        if not part.is_empty
    ]


def _if_any(*parts: Any) -> list[Any]:
    return [thing for thing in parts if thing]


def _accuracy_section(stats: RunStatistics, pictures: dict[str, Picture]) -> Section:
    likelihood = any(task.endswith(LIKELIHOOD) for task in stats.tasks)
    choice = any(task.endswith(CHOICE) for task in stats.tasks)
    return Section(
        heading="Accuracy by task and length",
        notes=[_ACCURACY, *_if_any(likelihood and _LIKELIHOOD, choice and _CHOICE_NOTE)],
        picture=pictures.get("accuracy"),
        tables=report_tables.accuracy_tables(stats),
        lines=list(report_tables.uniform_tasks(stats).values()),
    )


def _heat_maps(stats: RunStatistics, ranking: Ranking, prefix: str) -> list[HeatMap]:
    return [
        HeatMap(
            task=task_name(task),
            note=_task_description(task),
            picture=""
            if figures.single_samples(stats, task)
            else prefix + figures.picture_name(task),
            mark=filter_mark(task),
            tables=maps,
            lines=lines,
        )
        for task in stats.tasks
        for maps, lines in [figures.depth_maps(stats, ranking, task)]
        if maps
    ]


def _heat_notes(stats: RunStatistics) -> list[str]:
    counts = [
        len(stats.samples(label, task, (length,), depth))
        for task in stats.tasks
        for depth in stats.depths(task)
        for length in stats.lengths
        for label in stats.labels
    ]
    return [_HEAT] + [_FEW] * any(0 < count < 10 for count in counts)


def _task_description(task: str) -> str:
    """Return the comment at the start of a task's file, for a task of this package."""
    path = tasks.FOLDER / f"{task}.yaml"
    if not re.fullmatch(r"\w+", task) or not path.is_file():
        return ""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    return one_line(re.sub(r"^# ?", "", comment[0], flags=re.M)) if comment else ""


def _perplexity_section(stats: RunStatistics, pictures: dict[str, Picture]) -> Section:
    if not stats.losses:
        return Section(heading="Perplexity by position")
    texts = ", ".join(one_line(d["name"]) for d in stats.documents)
    notes = [_CURVES.format(window=stats.window, texts=texts or "the documents")]
    if stats.control and stats.control_record:
        notes.append(_CONTROL.format(context=stats.control_record["context"]))
        if stats.short_control and (half := stats.short_control_record):
            notes[-1] += _SHORT_CONTROL.format(context=half["context"])
    length_dependent = [m["label"] for m in stats.results["methods"] if m.get("follows_length")]
    if length_dependent:
        names = ", ".join(stats.names[label] for label in length_dependent)
        notes.append(_LENGTH_DEPENDENT.format(names=names, trained=stats.trained_length))
    return Section(
        heading="Perplexity by position",
        notes=notes,
        picture=pictures.get("perplexity"),
        tables=report_tables.perplexity_tables(stats),
    )


def _key_tokens_section(stats: RunStatistics) -> Section:
    record = stats.key_tokens_record
    evaluator = record.get("evaluator") if record else None
    plain = evaluator in (None, stats.plain)
    note = _KEY_TOKENS.format(
        evaluator="the plain model" if plain else one_line(evaluator),
        context=(record.get("short_context") or 0) if record else 0,
    )
    table = report_tables.key_token_table(stats)
    return Section(heading="LongPPL", notes=[note], tables=_if_any(table))


def _sliding_section(stats: RunStatistics, pictures: dict[str, Picture]) -> Section:
    record = stats.sliding_record
    stride = (record.get("stride") or 0) if record else 0
    return Section(
        heading="Perplexity by length of context",
        notes=[_SLIDING.format(stride=stride)],
        picture=pictures.get("sliding"),
        tables=_if_any(report_tables.sliding_table(stats)),
    )
