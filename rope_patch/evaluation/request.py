"""The request of an evaluation, and the checks that it can be met."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch import tasks
from rope_patch.entry_points import check, check_encoding
from rope_patch.evaluation.encoding_facts import require_measurable
from rope_patch.extension import Extension
from rope_patch.methods import registered_methods
from rope_patch.pretrained.device_map import require_device
from rope_patch.pretrained.gguf import split_gguf
from rope_patch.pretrained.loading import empty_model, require_dtype
from rope_patch.pretrained.quantization import parse_quantization, require_unquantized
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.tasks import short, texts
from rope_patch.units import parse_tokens, split_target
from rope_patch.utils.errors import did_you_mean

BASELINE = "none"
SERVED = "served"  # the label of a server's model, which is as it is
PERPLEXITY = "perplexity"
KEY_TOKENS = "key_tokens"
SLIDING = "sliding"
SPEED = "speed"
SHORT = "rp_short"
MEASURES = (PERPLEXITY, KEY_TOKENS, SLIDING, SPEED)

_LEAST = {
    **dict.fromkeys(("samples", "documents", "max_samples", "per_text", "short_samples"), 1),
    **dict.fromkeys(("perplexity_length", "window", "stride", "windows", "trained_length"), 1),
    "control_context": 2,
}
_TOKENS = ("perplexity_length", "window", "control_context", "trained_length")
_GROWING_SAMPLES = 10  # samples that a run starts with if it takes as many as it needs


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """What to evaluate.

    Attributes:
        model: A folder, a name on the Hub, or `demo`.
        methods: Names from `rope_patch.list_methods()`, and `none` for the plain model.
        factor: Target length / trained length, for the methods; or `length`.
        length: Target length in tokens.
        lengths: Lengths of the retrieval samples, in tokens. Texts are taken for numbers of tokens,
            and for `factor`, too: `32k`, `4x` (`rope_patch.units`).
        tasks: `perplexity`, `key_tokens`, `sliding`, `speed`, our tasks and groups of tasks
            (`rope_patch.tasks.names()`, `.groups()`, `rp_short`), and any task of lm-eval.
        samples: Retrieval samples at each length; one at each depth unless given.
        precision: Half-width that every accuracy's 95% interval must have; samples are doubled
            until it has, or `max_samples` are reached.
        until_decided: Whether samples of the longest length are doubled until the best method is
            shown to differ from the plain model by the likelihood of the right answers, or
            `max_samples` are reached.
        max_samples: See `precision` and `until_decided`.
        depths: The answers' positions in percent of the text.
        per_text: Retrieval samples that share a text; the task's default unless given, mostly one.
        controls: Whether to ask questions of texts without their answer, and without their text,
            too.
        share: Whether to read what prompts begin with in common once.
        texts: The long documents for perplexity: names from `texts.names()` or files.
        documents: The number of excerpts of these texts; one of each unless given.
        haystacks: Texts that retrieval samples are made of; if empty, all that come with us.
        chat_template: Whether questions on long texts are put into the tokenizer's chat template:
            `auto` (where it has one), `on` (lm-eval's own tasks, too) or `off`.
        questions: A file with questions in SQuAD's format for the question tasks, or in MMLU's for
            the numbered questions of RULERv2.
        include_paths: Folders of a user's own tasks, YAML files as lm-eval reads them.
        perplexity_length: Tokens of a document; the longest of `lengths` unless given.
        window: Tokens averaged into one point of the perplexity curve.
        control_context: Tokens of context that the control gets: the trained length, to which
            a user would cut the text instead, unless given.
        stride: Tokens scored in each window of sliding perplexity.
        windows: Sliding windows in each document.
        short_samples: Samples of each ordinary short task.
        trained_length: Tokens of pretraining, if the config gives another number.
        start: Where the config scales already: see `patch`.
        anyway: See `patch`.
        options: The methods' options.
        arguments: By method, arguments of `patch` that go before all others: what a search found.
        dtype: As in transformers; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        device_map: As in transformers; "auto" where there is a GPU.
        gguf_file: The GGUF file within the model's folder.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        quantization: What the weights are quantised to before anything is measured: a type of
            GGUF (`Q8_0`, `Q5_1`, `Q5_0`, `Q4_1`, `Q4_0`) or of bitsandbytes (`int8`, `nf4`).
        seed: The seed of the samples.
        folder: The folder of the report and of everything measured.
        command: The command line, to record.
    """

    model: str
    methods: tuple[str, ...]
    factor: float | None = None
    length: int | None = None
    lengths: tuple[int, ...] = (4096,)
    tasks: tuple[str, ...] = ("rp_niah_single_2", PERPLEXITY)
    samples: int | None = None
    precision: float | None = None
    until_decided: bool = False
    max_samples: int = 500
    depths: tuple[int, ...] = (10, 50, 90)
    per_text: int | None = None
    controls: bool = False
    share: bool = True
    texts: tuple[str, ...] = ("emma",)
    documents: int | None = None
    haystacks: tuple[str, ...] = ()
    chat_template: str = "auto"
    questions: str | None = None
    include_paths: tuple[str, ...] = ()
    perplexity_length: int | None = None
    window: int | None = None
    control_context: int | None = None
    stride: int = 256
    windows: int = 8
    short_samples: int = 100
    trained_length: int | None = None
    start: str = "auto"
    anyway: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: str = "auto"
    device_map: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    seed: int = 42
    folder: Path = Path("out")
    command: str = ""

    def __post_init__(self) -> None:
        factor, length = split_target(self.factor, self.length)
        texts = {name: parse_tokens(name, getattr(self, name)) for name in _TOKENS}
        lengths = tuple(parse_tokens("lengths", each) for each in self.lengths)
        for name, value in {
            **texts,
            "factor": factor,
            "length": length,
            "lengths": lengths,
        }.items():
            object.__setattr__(self, name, value)

    def sample_options(self, *, chat: bool) -> dict[str, Any]:
        """Return the options of the package's tasks; `chat`: put questions into a chat template."""
        options: dict[str, Any] = {"seed": self.seed, "chat": chat}
        if self.per_text is not None:
            options["per_text"] = self.per_text
        if self.haystacks:
            options["text"] = list(self.haystacks)
        if self.questions:
            options["questions"] = self.questions
        return options

    def extension(self, method: str) -> Extension:
        """Return the request to patch with one of the methods, with the options that it has."""
        known = registered_methods()
        names = known[method].__dataclass_fields__ if method in known else {}
        arguments = {key: value for key, value in self.options.items() if key in names}
        arguments |= {
            "trained_length": self.trained_length,
            "start": self.start,
            "anyway": self.anyway,
        }
        own = self.arguments.get(method, {})
        if not own.keys() & {"factor", "length"}:
            arguments |= {"factor": self.factor, "length": self.length}
        return Extension.of(method, **{**arguments, **own})

    @property
    def first_samples(self) -> int:
        """Return the samples of each retrieval task at each length that the run starts with."""
        if self.samples is not None:
            return self.samples
        if self.precision is None and not self.until_decided:
            return len(self.depths)
        return min(_GROWING_SAMPLES, self.max_samples)

    @property
    def retrieval(self) -> list[str]:
        """Return the retrieval tasks among `tasks`, groups replaced by theirs."""
        return [name for name in tasks.expand(list(self.tasks)) if name in tasks.names()]

    @property
    def short(self) -> list[str]:
        """Return the ordinary short tasks among `tasks`."""
        own = short.names()
        chosen = [own if name == SHORT else [name] for name in self.tasks]
        return list(dict.fromkeys(n for names in chosen for n in names if n in own))

    @property
    def harness(self) -> list[str]:
        """Return the names in `tasks` that are left for lm-eval."""
        ours = set(_own_names())
        return [name for name in self.tasks if name not in ours]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sample or document."""
        return max((*self.lengths, *filter(None, [self.perplexity_length])))


def check_request(request: EvalRequest, path: str, config: Any) -> None:
    """Raise if a request cannot be met, before anything large is read.

    Args:
        request: What is asked for.
        path: The model's folder or name.
        config: The model's config.

    Raises:
        ValueError: What was expected, what was got, and what to do.
    """
    if not request.tasks or not request.methods or not request.lengths:
        raise ValueError("expected at least one task, one method and one length")
    included = _included_tasks(request)
    for name in request.harness:
        if name not in included:
            _check_task(name)
    for name, least in _LEAST.items():
        value = getattr(request, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if request.precision is not None and not 0 < request.precision < 0.5:
        raise ValueError(
            "precision is half the width of a 95% interval of an accuracy, above 0 and below 0.5, "
            f"such as 0.05; got {request.precision:g}"
        )
    if request.until_decided:
        _check_until_decided(request)
    require_dtype(request.dtype)
    require_device(request.device_map)
    if request.quantization is not None:
        quantization = parse_quantization(request.quantization)
        require_unquantized(quantization, config, split_gguf(path, request.gguf_file)[1])
    if SPEED in request.tasks and len(set(request.methods)) < 2:
        raise ValueError("speed is a ratio to the first method's: give at least two methods")
    for text in (*request.texts, *request.haystacks):
        texts.read_text(text)
    check_methods(request, path, config)


def _check_until_decided(request: EvalRequest) -> None:
    """Raise if there is nothing that more samples could decide."""
    wanted = "until_decided takes more samples until the best method is told from the plain model"
    if request.precision is not None:
        raise ValueError(
            f"{wanted}, precision until accuracies have an interval: expected one of them, got both"
        )
    if not request.retrieval:
        raise ValueError(
            f"{wanted} by the likelihood of the right answers: expected a retrieval task, got "
            f"{', '.join(request.tasks)}; add one such as rp_niah_multikey_1_ll to --tasks"
        )
    if BASELINE not in request.methods or len(set(request.methods)) < 2:
        raise ValueError(
            f"{wanted}: expected --method {BASELINE} and at least one more, got "
            f"{', '.join(request.methods)}"
        )
    if request.first_samples >= request.max_samples:
        raise ValueError(
            f"{wanted}: expected max_samples above the {request.first_samples} samples that the "
            f"run starts with, got {request.max_samples}; give a larger --max-samples"
        )


def check_methods(request: EvalRequest, path: str, config: Any) -> None:
    """Refuse methods that the model cannot be patched with; their tasks may be unknown yet.

    Args:
        request: What is asked for.
        path: The model's folder or name.
        config: The model's config.

    Raises:
        ValueError: What was expected, what was got, and what to do.
    """
    _check_saved(request, patch_to_restore(path))
    model = None
    for method in request.methods:
        if method == BASELINE:
            continue
        model = model or empty_model(path, config)
        extension = request.extension(method)
        if plan := check_encoding(model, extension):
            require_measurable(config, plan)
        else:
            check(model, extension)
    _check_options(request)


def _own_names() -> list[str]:
    return [*MEASURES, *tasks.groups(), *tasks.names(), SHORT, *short.names()]


def _included_tasks(request: EvalRequest) -> set[str]:
    """Return the names of the tasks in users' folders; raise if one is a name of ours."""
    if not request.include_paths:
        return set()
    from rope_patch.evaluation.measures.external_tasks import TaskIndex

    index = TaskIndex(request.include_paths)
    if clashes := sorted(index.own.keys() & set(_own_names())):
        raise ValueError(
            f"--include-path: {index.roots[clashes[0]]} has a task {clashes[0]!r}, which is a task "
            "of this package (known without --include-path): rename yours"
        )
    return set(index.own)


def _check_task(name: str) -> None:
    """Raise if a name resembles a task of this package; let names pass that lm-eval may know."""
    known = _own_names()
    has_lm_eval = importlib.util.find_spec("lm_eval") is not None
    if name.startswith("rp_") or (did_you_mean(name, known, cutoff=0.7) and not has_lm_eval):
        raise tasks.unknown_task(name, known)


def _check_options(request: EvalRequest) -> None:
    patches = [method for method in request.methods if method != BASELINE]
    known = registered_methods()
    fields = {key for m in patches if m in known for key in known[m].__dataclass_fields__}
    if unused := sorted(request.options.keys() - fields):
        raise ValueError(
            f"none of the methods {', '.join(request.methods)} has the option {unused[0]!r}; their "
            f"options are: {', '.join(sorted(fields)) or 'none'}"
        )


def _check_saved(request: EvalRequest, saved: dict[str, Any] | None) -> None:
    """Raise if the request patches a saved patch again."""
    if saved is None or set(request.methods) == {BASELINE}:
        return
    raise ValueError(
        f"{request.model} holds a model that was saved with {saved['method']} in it: evaluate it "
        f"as it is (--method {BASELINE}), or evaluate the original checkpoint with --method "
        f"{saved['method']}"
    )
