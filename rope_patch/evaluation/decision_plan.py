"""The plan of a run: what it measures, how long that takes here, and what it can decide.

`compare`, `recommend`, `search`, `extend` and `lab` say it before they start; with `--plan` they
say it and stop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rope_patch import statistics
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.request import BASELINE, EvalRequest
from rope_patch.evaluation.results_schema import UnscoredSample
from rope_patch.inference.prefix_reader import input_device
from rope_patch.statistics import SIGNIFICANCE_LEVEL
from rope_patch.tasks import question_of, text_of
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

# How far the gain of a method varies, as standard deviations in nats a token: between the answers
# to one text's questions, and between texts. Measured beyond the trained length on SmolLM2-135M,
# `yarn` against the plain model, 32 questions about eight texts at five depths
# (eval/results/smollm2/report.json, rp_niah_multikey_1_ll): 1.04 at 12,288 tokens and 1.15 at
# 16,384 between answers; the means of texts vary by 0.23 and 0.64, where independent answers would
# have 0.52 and 0.58, so what texts add is small. At one depth, answers vary by 0.48 and 0.78: where
# each text is asked at the same depths, only that counts. Rounded up here. Another model or task
# varies otherwise.
ANSWER_DEVIATION = 1.25
DEPTH_ANSWER_DEVIATION = 0.8
TEXT_DEVIATION = 0.2
_MEASURED_ON = "SmolLM2-135M"

_EXAMPLES = (1.0, 0.5)  # effects in nats a token: answers' tokens 2.7 and 1.6 times as likely
_MAX_SAMPLES = 2000  # samples a task that are tried for a usable length

# A pass that takes as long is told from the costs of calling a model, which grow where threads wait
# for a busy core: SmolLM2 beside another run, 64 tokens 3.4 s, 512 tokens 9.2 s.
_TIMED_SECONDS = 4.0
_MOST_TIMED = 2048  # tokens of the longest pass that is timed

Planned = Mapping[tuple[str, int], Sequence[UnscoredSample]]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run measures, how long that takes on this machine, and what it can decide.

    Attributes:
        measures: What is measured, a line each.
        seconds: About how long that takes, from one short pass.
        budget: Seconds that the run may take; None where it has no budget.
        reserve: Seconds of them that the run's end takes, whatever the budget.
        decides: What the run can decide, a sentence each.
        missing: Why it is not enough for a verdict, and how long one takes; "" if it is enough.
    """

    measures: tuple[str, ...]
    seconds: float
    budget: float | None = None
    reserve: float = 0.0
    decides: tuple[str, ...] = ()
    missing: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        budget = "" if self.budget is None else f", of {format_duration(self.budget)} allowed"
        missing = [f"not enough for a verdict: {self.missing}"] * bool(self.missing)
        return "\n".join(
            [
                *(f"measures: {each}" for each in self.measures),
                f"takes: about {format_duration(self.seconds)} on this machine{budget}",
                *(f"decides: {each}" for each in self.decides),
                *missing,
            ]
        )


def try_plan(make: Callable[[], RunPlan]) -> RunPlan | None:
    """Return the plan of a run that begins, or None where the timed pass fails.

    What fails here fails again where the run says which part of it is missing.

    Args:
        make: Returns the plan.
    """
    try:
        return make()
    except Exception as error:
        logger.debug("the plan's timed pass failed: %s", error)
        return None


class PassTime:
    """The time of a model's forward passes, from one short pass on this machine.

    Longer passes cost by their multiplications: of weights once a token, of attention once a pair
    of tokens.

    Args:
        model: A causal language model, patched or not.
        longest: Tokens of the longest pass to tell the time of.
    """

    def __init__(self, model: Any, longest: int) -> None:
        text = model.config.get_text_config(decoder=True)
        embedded = model.get_input_embeddings().weight.numel()
        self._weights = max(model.num_parameters() - embedded, 1)
        heads = getattr(text, "num_attention_heads", 1)
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        self._attention = 2 * text.num_hidden_layers * heads * width
        self._tokens, self._seconds = self._time(model, min(longest, _MOST_TIMED))

    def seconds(self, tokens: int) -> float:
        """Return about how long a pass of so many tokens takes."""
        return self._seconds * self._cost(tokens) / self._cost(self._tokens)

    def _cost(self, tokens: int) -> float:
        return self._weights * tokens + self._attention * tokens**2

    @torch.no_grad()
    def _time(self, model: Any, most: int) -> tuple[int, float]:
        """Double the tokens of a pass until it takes a while; return its tokens and its seconds."""
        tokens, device = min(64, most), input_device(model)

        def read() -> None:
            ids = torch.ones(1, tokens, dtype=torch.long, device=device)
            # `item` waits for a GPU.
            model(ids, use_cache=False, logits_to_keep=1).logits[0, -1, 0].item()

        read()  # the first pass loads libraries
        while True:
            started = time.monotonic()
            read()
            seconds = max(time.monotonic() - started, 1e-6)
            if seconds >= _TIMED_SECONDS or tokens == most:
                return tokens, seconds
            tokens = min(2 * tokens, most)


def effect_sentence(texts: int, methods: int, length: int, family: str = "methods") -> str:
    """Return which gain over the plain model one question about each text shows.

    Args:
        texts: The number of texts, at least as many as decide.
        methods: How many are compared with the plain model.
        length: Tokens.
        family: What they are, in the plural.
    """
    deviation = text_deviation(1)
    level = SIGNIFICANCE_LEVEL / max(methods, 1)
    effect = statistics.smallest_effect(texts, deviation, level)
    holm = f" after Holm over {methods} {family}" if methods > 1 else ""
    return (
        f"with {texts} texts at {length:,} tokens, a gain over the plain model of {effect:.1f} "
        f"nats a token or more (p < {SIGNIFICANCE_LEVEL}{holm}). That holds "
        f"{_assumption(deviation)}"
    )


def log_plan(request: EvalRequest, planned: Planned, trained_length: int) -> None:
    """Log what a run can decide.

    Args:
        request: What to evaluate.
        planned: The samples of each retrieval task and length.
        trained_length: Tokens.
    """
    for sentence in plan_sentences(request, planned, trained_length):
        logger.info("plan: %s", sentence)


def plan_sentences(request: EvalRequest, planned: Planned, trained_length: int) -> list[str]:
    """Return what a run can decide by likelihood and by accuracy; nothing without retrieval tasks.

    Args:
        request: What to evaluate.
        planned: The samples of each retrieval task and length.
        trained_length: Tokens.
    """
    methods, length = len(set(request.methods) - {BASELINE}), max(request.lengths)
    if not planned:
        return []
    if BASELINE not in request.methods:
        without = "without the plain model this run cannot decide whether a method gains anything"
        return [f"{without}: give --method {BASELINE}, too"] if methods > 1 else []
    by_accuracy = _accuracy_sentences(planned, length, trained_length)
    if not methods:
        return list(by_accuracy)
    if length <= trained_length:
        return [
            f"no length is beyond the trained {trained_length:,} tokens: this run cannot decide "
            "what a method gains; give a longer one among --lengths"
        ]
    return [*_likelihood_sentences(request, planned, length, methods), *by_accuracy]


def texts_short_of_verdict(request: EvalRequest, planned: Planned) -> tuple[int, int] | None:
    """Return the texts at the longest length and those that decide; None if they are enough.

    Args:
        request: What to evaluate.
        planned: The samples of each retrieval task and length.
    """
    methods, length = len(set(request.methods) - {BASELINE}), max(request.lengths)
    texts = {
        (text_of(name), sample["text"])
        for (name, at), samples in planned.items()
        if at == length
        for sample in samples
    }
    if not methods or not texts or BASELINE not in request.methods or request.until_decided:
        return None
    least = statistics.least_texts(SIGNIFICANCE_LEVEL / methods)
    return (len(texts), least) if len(texts) < least else None


def text_deviation(questions: float, has_equal_depths: bool = False) -> float:
    """Return the assumed standard deviation of texts' mean gains, in nats a token.

    Args:
        questions: Questions about each text.
        has_equal_depths: Whether each text is asked at the same depths.
    """
    answers = DEPTH_ANSWER_DEVIATION if has_equal_depths else ANSWER_DEVIATION
    return math.hypot(TEXT_DEVIATION, answers / math.sqrt(questions))


def has_equal_depths(samples: Sequence[UnscoredSample]) -> bool:
    """Return whether there are several texts, and each is asked at the same depths."""
    by_text: dict[int, list[int | None]] = {}
    for sample in samples:
        by_text.setdefault(sample["text"], []).append(sample["depth"])
    first, *others = [sorted(depths, key=str) for depths in by_text.values()]
    return bool(others) and None not in first and all(depths == first for depths in others)


def _likelihood_sentences(
    request: EvalRequest, planned: Planned, length: int, methods: int
) -> Iterator[str]:
    by_question: dict[str, Sequence[UnscoredSample]] = {}
    for (task, at), samples in planned.items():
        if at == length:
            by_question.setdefault(question_of(task), samples)
    count = sum(map(len, by_question.values()))
    sources = {
        (name, sample["text"]) for name, samples in by_question.items() for sample in samples
    }
    texts = len({(text_of(name), text) for name, text in sources})
    questions, kinds = count / texts, len(set(map(text_of, by_question)))
    equal_depths = all(map(has_equal_depths, by_question.values()))
    deviation = text_deviation(questions, equal_depths)
    level = SIGNIFICANCE_LEVEL / methods / statistics.look_factor(int(request.until_decided))
    holm = f" after Holm over {methods} methods" if methods > 1 else ""
    least = statistics.least_texts(level)
    if texts < least:
        has = "one text" if texts == 1 else f"{texts} texts"
        yield (
            f"this run cannot decide which method is better: it has {has} at {length:,} tokens, "
            f"too few texts to say ({least} decide{holm})"
        )
    else:
        effect = statistics.smallest_effect(texts, deviation, level)
        yield (
            f"{count} questions about {texts} texts at {length:,} tokens show which method changes "
            f"the likelihood of the right answers (p < {SIGNIFICANCE_LEVEL}{holm}) if it does by "
            f"{effect:.1f} nats a token or more. That holds {_assumption(deviation)}"
        )
    if request.until_decided:
        yield (
            f"undecided, the run doubles its texts, to {request.max_samples} samples a task at "
            "most; p is corrected for each look at them"
        )
        return
    takes = []
    for example in _EXAMPLES:
        needed = statistics.required_texts(example, deviation, level)
        if needed and needed > texts:
            each = math.ceil(needed / kinds) * math.ceil(count / len(sources))
            takes.append(f"{example:.1f} nats takes {needed:,} texts (--samples {each})")
    if takes:
        yield f"a change by {', by '.join(takes)}; --until-decided takes as many as it needs"


def _assumption(deviation: float) -> str:
    return (
        f"in {statistics.POWER:.0%} of runs, if changes vary between texts by {deviation:.1f} "
        f"nats, as on {_MEASURED_ON}"
    )


def _accuracy_sentences(planned: Planned, length: int, trained_length: int) -> Iterator[str]:
    if length <= trained_length:
        return
    counts = {at: len(samples) for at, samples in planned.items()}
    retention = _perfect_retention(planned, counts, trained_length)
    if retention is None:
        return
    usable = f"call {length:,} tokens usable (retention surely above {THRESHOLD:.0%})"
    best = f"with every answer right, retention is surely above {retention:.0%}"
    if retention >= THRESHOLD:
        yield f"accuracies can {usable}: {best}"
        return

    def is_enough(samples: int) -> bool:
        grown = {at: max(count, samples) for at, count in counts.items()}
        return (_perfect_retention(planned, grown, trained_length) or 0.0) >= THRESHOLD

    needed = statistics.least_number(is_enough, min(counts.values()), _MAX_SAMPLES)
    takes = f"; it takes {needed} samples a task" if needed else ""
    yield f"accuracies cannot {usable}: {best} only{takes}"


def _perfect_retention(
    planned: Planned, counts: Mapping[tuple[str, int], int], trained_length: int
) -> float | None:
    """Return the least of retention's lower bounds if every answer is right, or None."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for (task, length), samples in planned.items():
        per_text = math.ceil(len(samples) / len({sample["text"] for sample in samples}))
        for number in range(counts[task, length]):
            place = {"id": f"{length}/{number}", "text": number // per_text}
            by_task.setdefault(task, []).append({**samples[0], **place, "score": 1.0})
    lengths = sorted({length for _, length in planned})
    results: Any = {
        "run": {"trained_length": trained_length},
        "methods": [{"label": BASELINE, "method": None}],
        "retrieval": [
            {"task": task, "lengths": lengths, "samples": {BASELINE: rows}}
            for task, rows in by_task.items()
        ],
    }
    stats = RunStatistics(results)
    # A length is usable if all shorter ones are.
    kept = [stats.retention(BASELINE, length) for length in lengths]
    return min((each.low for each in kept if each is not None), default=None)
