"""The schema of an evaluation's results: what `report.json` holds, beside its format and digest.

A run writes every key but the optional ones. Infinities and NaN are texts, which `float()` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, final

from rope_patch.utils.provenance import Hardware

Number = float | Literal["Infinity", "-Infinity", "NaN"]


class OptionalSampleKeys(TypedDict, total=False):
    """The keys that only some samples have.

    Attributes:
        chance: The expected score of a guess, if the task can be guessed.
        error: Why the sample failed.
        prompt: The digest of what was asked, as lm-eval makes it; older results lack it.
    """

    prompt: str
    chance: float
    error: str


class UnscoredSample(OptionalSampleKeys):
    """A retrieval sample without its score.

    Attributes:
        id: The sample's name: seed, task, length and number.
        text: The text's number; samples with the same number share a text.
        length: Tokens of the prompt and the answer.
        depth: The answer's position in percent of the text; None if the answer has no single one.
        target_tokens: Tokens of the right answer; 0 if unknown, as of lm-eval's own tasks.
        log_likelihood: The right answer's, in nats; None if it was not measured.
    """

    id: str
    text: int
    length: int
    depth: int | None
    target_tokens: int
    log_likelihood: Number | None


class SampleRecord(UnscoredSample):
    """A retrieval sample.

    Attributes:
        score: 0 to 1; None if the sample failed.
    """

    score: float | None


class RetrievalRecord(TypedDict):
    """A retrieval task, one of its controls, or any other task whose samples are made at a length.

    Attributes:
        task: The task's name.
        lengths: Tokens.
        depths: The answers' positions in percent of the text.
        samples: The samples by method.
    """

    task: str
    lengths: Sequence[int]
    depths: Sequence[int]
    samples: Mapping[str, Sequence[SampleRecord]]


ControlKind = Literal["no answer", "closed book"]


class QuestionControlRecord(RetrievalRecord, total=False):
    """A control of a retrieval task, asked of the plain model.

    Attributes:
        kind: "no answer": texts without the answer; "closed book": the question without the text.
            Older results lack it, and have the first alone.
    """

    kind: ControlKind


class DocumentRecord(TypedDict):
    """A long document.

    Attributes:
        name: The text's name or file.
        tokens: The number of tokens.
        sha256: The digest of the tokens.
    """

    name: str
    tokens: int
    sha256: str


class ControlRecord(TypedDict):
    """The control of perplexity: the plain model, given the near past alone.

    Attributes:
        context: Tokens of each pass; the last window of them is scored.
        losses: Mean nats of a window by the position where it ends, for each document.
    """

    context: int
    losses: Sequence[Mapping[str, Number]]


class KeyTokensRecord(TypedDict):
    """LongPPL.

    Attributes:
        evaluator: The model that chose the key tokens: "the plain model", or a method.
        short_context: Tokens of the short context.
        positions: The key tokens' positions, for each document.
        losses: Nats of each key token, by method and document.
    """

    evaluator: str
    short_context: int
    positions: Sequence[Sequence[int]]
    losses: Mapping[str, Sequence[Sequence[Number]]]


class SlidingRecord(TypedDict):
    """Perplexity by sliding windows.

    Attributes:
        stride: Tokens scored in each window.
        lengths: Tokens of a window.
        losses: Mean nats of each window, by method, length (as text) and document.
    """

    stride: int
    lengths: Sequence[int]
    losses: Mapping[str, Mapping[str, Sequence[Sequence[Number]]]]


class LaterPerplexityKeys(TypedDict, total=False):
    """`short_control`: half of the control's context; older files lack it."""

    short_control: ControlRecord | None


class PerplexityRecord(LaterPerplexityKeys):
    """The measurements on long documents.

    Attributes:
        documents: The documents.
        block: Tokens of a block.
        window: Tokens of a point of the curve.
        losses: Mean nats of each block, by method and document.
        control: The control; None if it was not measured.
        key_tokens: LongPPL; None if it was not requested.
        sliding: Sliding windows; None if they were not requested.
    """

    documents: Sequence[DocumentRecord]
    block: int
    window: int
    losses: Mapping[str, Sequence[Sequence[Number]]]
    control: ControlRecord | None
    key_tokens: KeyTokensRecord | None
    sliding: SlidingRecord | None


class ShortRecord(TypedDict):
    """An ordinary short task.

    Attributes:
        task: The task's name.
        n: The number of samples.
        chance: The accuracy of guessing; None if it is unknown.
        samples: 1 or 0 for each sample by method; None for a sample that failed.
    """

    task: str
    n: int
    chance: float | None
    samples: Mapping[str, Sequence[int | None]]


class CostRecord(TypedDict):
    """Time and memory of a method.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        prompt_seconds: Seconds to read the prompt, the median of the repeats.
        prompt_ratio: That time over the first method's: smallest, median and largest.
        token_seconds: Seconds to decode a token, the median.
        token_ratio: That time over the first method's: smallest, median and largest.
        cache_bytes: Bytes of the cache.
        peak_bytes: Bytes of the cache and of what decoding a token holds at most.
    """

    prompt_tokens: int
    prompt_seconds: float
    prompt_ratio: Sequence[float]
    token_seconds: float
    token_ratio: Sequence[float]
    cache_bytes: int
    peak_bytes: int


class FrequenciesRecord(TypedDict):
    """The frequencies of a layer type.

    Attributes:
        unscaled: Radians per token for each pair, without a method.
        inv_freq: Radians per token for each pair, under the method.
        attention_factor: The factor of cos and sin.
    """

    unscaled: Sequence[float]
    inv_freq: Sequence[float]
    attention_factor: float


class PatchedMethodKeys(TypedDict, total=False):
    """The keys that every method has, and the plain model has not.

    Attributes:
        paper: The method's source.
        factor: Target length / trained length.
        length: The target length in tokens.
        follows_length: Whether the frequencies depend on the length.
        options: The method's options.
        rope_parameters: The parameters of a config by layer type.
        frequencies: The frequencies by layer type.
    """

    paper: str
    factor: float | None
    length: int | None
    follows_length: bool
    options: Mapping[str, object]
    rope_parameters: Mapping[str, object]
    frequencies: Mapping[str, FrequenciesRecord]


class MethodRecord(PatchedMethodKeys):
    """A method that ran.

    Attributes:
        label: The method's name in all other records.
        method: The registered name; None for the plain model.
    """

    label: str
    method: str | None


class GeometryRecord(TypedDict):
    """The unscaled rotation of a layer type.

    Attributes:
        head_dim: Dimensions of a head.
        rotary_dim: Dimensions that rotate.
        theta: The base of the frequencies.
        trained_length: Tokens.
    """

    head_dim: int
    rotary_dim: int
    theta: float
    trained_length: int


class TokenCounts(TypedDict):
    """Tokens of the prompts.

    Attributes:
        asked: Tokens of all prompts over 512 tokens; choices after a prompt add nothing.
        read: Tokens that went through the model; the rest came from a shared prefix.
    """

    asked: int
    read: int


class LaterModelFacts(TypedDict, total=False):
    """The facts that the first reports of this format lack.

    Attributes:
        quantization: What the weights were quantised to after loading; None without.
        server: The server that held the model; a model in this process has none.
        servers: The servers by label, where several are compared.
    """

    quantization: str | None
    server: ServerRecord
    servers: Mapping[str, ServerRecord]


class ModelFacts(LaterModelFacts):
    """Facts about a model, those of a server's model None where it does not say.

    Attributes:
        name: The model's short name.
        architecture: The model's class.
        parameters: The number of parameters.
        dtype: The data type of the weights.
        attention: The attention kernel.
        device: The model's device.
        peak_memory: Bytes.
        hardware: The machine.
    """

    name: str
    architecture: str | None
    parameters: int | None
    dtype: str | None
    attention: str | None
    device: str
    peak_memory: int | None
    hardware: Hardware | None


class LaterRunKeys(TypedDict, total=False):
    """The keys that the first reports of this format lack.

    Attributes:
        failed: Samples of short tasks that failed, by task and method, with the reason.
        cautions: What the plain model does no better than chance.
        chat_template: The fingerprint of the chat template around questions; None without one.
        looks: Samples a task at the longest length, at each look of `--until-decided`; else empty.
        untimed_answers: An earlier run's answers whose time is not known.
        stored_seconds: Seconds by part, as they are stored with answers and passes: without
            loading and building, and equal whether the run was continued or not.
        code: The digest of the Python code that came with the checkpoint; missing without any.
    """

    failed: list[str]
    cautions: list[str]
    chat_template: str | None
    looks: Sequence[int]
    untimed_answers: int
    stored_seconds: Mapping[str, float]
    code: str


class RotationRecord(TypedDict):
    """How a server rotates.

    Attributes:
        rotation: The verdict in words, or why there is none.
        rotates_as_asked: Whether it rotates as the model's config asks; None if unknown.
        verification: What `rope-patch verify --json` prints; None if it was not verified.
    """

    rotation: str
    rotates_as_asked: bool | None
    verification: Mapping[str, object] | None


class ServerRecord(RotationRecord):
    """The server that held the model.

    Attributes:
        url: Its address.
        served_model: The served model's name.
        engine: The engine, with its version if it says so.
        max_length: Tokens that it takes; None if it does not say.
        log_probs: Whether it gives log-probabilities of prompts.
        tokenizer: Where the tokenizer was read from.
        tokenizer_digest: The digest of the tokenizer.
        concurrency: Requests at once.
        prompts: How prompts were sent, and who put them into a chat template.
    """

    url: str
    served_model: str
    engine: str
    max_length: int | None
    log_probs: bool
    tokenizer: str
    tokenizer_digest: str
    concurrency: int
    prompts: str


class RunMetadata(LaterRunKeys, ModelFacts):
    """Where and how an evaluation ran.

    Attributes:
        model: The model as it was requested: a folder, a name on the Hub, or `demo`.
        trained_length: Tokens.
        geometry: The unscaled rotation by layer type.
        seed: The seed of the samples.
        precision: The requested half-width of accuracies' intervals.
        per_text: Samples that share a text.
        processes: The number of processes.
        date: The time at the end, in UTC.
        seconds: Seconds by part, and in `total`.
        continued: Whether an earlier run left results; `seconds` includes their time.
        prompt_tokens: Tokens of the prompts.
        weights: The fingerprint of the weights.
        versions: The versions of the packages that results depend on.
        git_revision: The commit of this package's source; None outside a checkout.
        command: The command that repeats the run; empty if a program called.
        not_run: The requested parts that could not be measured, with the reason.
    """

    model: str
    trained_length: int
    geometry: Mapping[str, GeometryRecord]
    seed: int
    precision: float | None
    per_text: int | None
    processes: int
    date: str
    seconds: Mapping[str, float]
    continued: bool
    prompt_tokens: TokenCounts
    weights: str | None
    versions: Mapping[str, str]
    git_revision: str | None
    command: str
    not_run: list[str]


# How a run's caution begins under which perplexities tell nothing of methods.
UNREAD = "the model reads these documents no better than chance"


class UsableRecord(TypedDict):
    """The longest length up to which 85% of the plain model's short-context score is kept.

    It is computed from the samples whenever a report is written; see
    `rope_patch.statistics.UsableLength`.

    Attributes:
        estimate: The longest measured length that is kept by the isotonic fit; None if there is
            none.
        low: The longest length that is shown to be usable; None if there is none.
        high: The shortest length that is shown not to be usable; None if there is none.
        lengths: The measured lengths, between which and beyond which nothing is said.
        texts_needed: About how many texts a task would decide; None where none would, or all is
            decided.
    """

    estimate: int | None
    low: int | None
    high: int | None
    lengths: Sequence[int]
    texts_needed: int | None


class FirstScreenRow(TypedDict):
    """A method's row in a report's first table: each an estimate with its low and high end.

    Attributes:
        right: The share of right answers at `right_length`.
        loss: The loss of the right answers at `loss_length`, in nats a token.
        perplexity_beyond: Perplexity beyond the trained length.
        price_perplexity: Perplexity up to the trained length over the plain model's.
        price_short_tasks: Right answers at short tasks, as a share, less the plain model's.
        prompt_time: The time to read a prompt over the first method's: median, smallest, largest.
        token_time: The time to write a token, likewise.
    """

    right: list[float] | None
    loss: list[float] | None
    perplexity_beyond: list[float] | None
    price_perplexity: list[float] | None
    price_short_tasks: list[float] | None
    prompt_time: list[float] | None
    token_time: list[float] | None


class FirstScreenRecord(TypedDict):
    """What stands above a report's folds; see `rope_patch.evaluation.report.conclusions`.

    Attributes:
        headline: Which method to use.
        reason: Why none is shown to help, or which others are not told apart from the method.
        usable: Usable lengths in words.
        method: The label of the method to use; None where none is shown to help.
        measure: What the headline is in: "accuracy" or "loss"; empty where it has no number.
        length: Tokens that the headline is about.
        right_length: Tokens at which `right` was measured.
        loss_length: Tokens at which `loss` was measured.
        methods: The rows by label.
    """

    headline: str
    reason: str
    usable: str
    method: str | None
    measure: str
    length: int | None
    right_length: int | None
    loss_length: int | None
    methods: Mapping[str, FirstScreenRow]


class DerivedRecords(TypedDict, total=False):
    """What follows from the samples; earlier reports lack it.

    Attributes:
        usable: Usable lengths in tokens by method and group of tasks; "all" is the mean of all
            tasks.
        first_screen: The report's headline and first table.
    """

    usable: Mapping[str, Mapping[str, UsableRecord]]
    first_screen: FirstScreenRecord


class OtherRecords(DerivedRecords):
    """The parts of a run that are neither perplexity nor retrieval.

    Attributes:
        short: Ordinary short tasks.
        cost: Time and memory by method; empty if not requested.
        harness: lm-eval's own tasks, and users', with samples of their own lengths.
    """

    short: Sequence[ShortRecord]
    cost: Mapping[str, CostRecord]
    harness: Sequence[HarnessRecord]


@final
class RunRecord(OtherRecords):
    """The results of one run.

    Attributes:
        run: Where and how it ran.
        methods: The methods in the order of the request.
        perplexity: The measurements on long documents; None if none was requested.
        retrieval: Retrieval tasks.
        control: Questions to the plain model on texts without the answer.
    """

    run: RunMetadata
    methods: Sequence[MethodRecord]
    perplexity: PerplexityRecord | None
    retrieval: Sequence[RetrievalRecord]
    control: Sequence[QuestionControlRecord]


@final
class RunsRecord(TypedDict):
    """The results of several runs in one report, in order."""

    runs: Sequence[RunRecord]


class OptionalMetricKeys(TypedDict, total=False):
    """The keys of metrics that are means of samples, in the task's order.

    Attributes:
        scores: The score of each sample, 0 to 1, if the value is their mean; None for a sample
            that failed.
        texts: The number of each sample's text, if some samples with scores share one.
        losses: The nats of each sample, and its weight, such as its words, if the value is a
            perplexity: exp of the sum of nats over the sum of weights.
        prompts: The digest of what was asked, of all samples; older results lack it.
    """

    prompts: str
    scores: Sequence[float | None]
    texts: Sequence[int]
    losses: Sequence[Sequence[float]]


class MetricRecord(OptionalMetricKeys):
    """A metric of one of lm-eval's own tasks.

    Attributes:
        value: The value that lm-eval gives.
        stderr: The standard error; None if the metric is no mean or all samples score alike.
    """

    value: float | Literal["Infinity", "-Infinity", "NaN"] | str | None
    stderr: float | None


class HarnessRecord(TypedDict):
    """One of lm-eval's own tasks, or of a user's; those made at a length are in `retrieval`.

    Attributes:
        task: The task's name.
        metrics: The metrics by method and name.
    """

    task: str
    metrics: Mapping[str, Mapping[str, MetricRecord]]
