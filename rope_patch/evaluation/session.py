"""The session: the model under one method after another, and what a killed run had computed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from rope_patch import patching
from rope_patch.encodings.active import current
from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.entry_points import patch
from rope_patch.evaluation.encoding_facts import (
    RowsGuard,
    encoding_identity,
    encoding_label,
    model_lengths,
)
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures.external_tasks import ExternalTask
from rope_patch.evaluation.request import BASELINE, EvalRequest
from rope_patch.evaluation.results_schema import MethodRecord, ModelFacts, TokenCounts
from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.methods import Frequencies
from rope_patch.methods.position_map import PositionMap
from rope_patch.patching import Patch
from rope_patch.patching.method_wrappers import method_origin, unwrap
from rope_patch.pretrained import demo
from rope_patch.pretrained.device_map import placement
from rope_patch.pretrained.loading import load, read_model
from rope_patch.pretrained.quantization import loading_arguments, parse_quantization, quantize
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.runs.journal import JournalFile, check_lines
from rope_patch.runs.run_folder import RunFolder
from rope_patch.tasks import chat_template
from rope_patch.transformers_api.models import attention_implementation
from rope_patch.transformers_api.remote_code import CodeIdentity, code_identity
from rope_patch.utils import checksums, provenance
from rope_patch.utils.atomic_files import NotWritten
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes

logger = logging.getLogger("rope_patch")

_FORMAT = "rope_patch.eval.piece/1"
CACHE = "cache"  # name of the folder of answers and pieces

T = TypeVar("T")


@dataclass(frozen=True)
class CachedComputation(Generic[T]):
    """A part of the results that is computed from passes of one length and cached.

    Attributes:
        identity: The identity of the computation, besides the model and its present method.
        length: Tokens of each pass.
        compute: Computes it; JSON must give the value back unchanged.
    """

    identity: dict[str, Any]
    length: int
    compute: Callable[[], T]


class Session:
    """One evaluation's model, its answers so far, and its processes.

    Args:
        request: What to evaluate.
        path: The model's folder or name.
        config: Its config.
        tokenizer: Its tokenizer.

    Attributes:
        plain_label: The label of the model as it is.
        aborting: Errors after which no later measurement could succeed either.
        model: The model; None until `load`.
        weights: The fingerprint of the weights, as they are after `quantization`.
        quantization: What the weights were quantised to; None if they are the checkpoint's.
        code: The digest of the code that came with the checkpoint (`code_identity`), if any did.
        run_folder: The folder of stored answers and pieces.
        geometries: By layer type.
        trained_length: Tokens.
        chat: Whether questions stand in the tokenizer's chat template.
        methods: The records of the methods that ran, by label.
        seconds: Time taken, by part.
        tokens: Tokens of the prompts (`asked`), and those that went through the model (`read`).
        continued: Whether an earlier run left answers or pieces. Their time is in `seconds`.
        earlier_seconds: The time of an earlier run's pieces and answers.
        stored_seconds: By part, the time that is stored with answers and pieces, each once: equal
            in a run that continues and in one that never stopped.
        not_run: Requested parts that could not be measured, with the reason.
        failed: Samples of short tasks that failed and are not counted, with the reason.
    """

    plain_label = BASELINE
    aborting: tuple[type[Exception], ...] = (NotWritten,)
    model: Any = None
    weights: str | None = ""
    _other_config: str | None = None
    quantization: str | None = None
    continued = False
    earlier_seconds = 0.0

    def __init__(self, request: EvalRequest, path: str, config: Any, tokenizer: Any) -> None:
        self.request = request
        self.path = path
        self.tokenizer = tokenizer
        self._versions = provenance.versions()  # once: they are part of every answer's identity
        self._checkpoint_dtype = getattr(config, "dtype", None)
        self.chat = chat_template.resolve(request.chat_template, tokenizer)
        self.processes = Processes()
        self.run_folder = RunFolder(request.folder)
        self.geometries, self.trained_length = model_lengths(
            path, config, request.trained_length, request.start
        )
        self.code: CodeIdentity = {}
        self.methods: dict[str, MethodRecord] = {}
        self.seconds: dict[str, float] = {}
        self.stored_seconds: dict[str, float] = {}
        self._part = ""  # what `timer` times; empty outside
        self._pieces: set[str] = set()  # keys, computed in this run or counted as an earlier one's
        self.tokens: TokenCounts = {"asked": 0, "read": 0}
        self.not_run: list[str] = []
        self.failed: list[str] = []

    def check_tasks(self, external: Sequence[ExternalTask]) -> None:
        """Raise if a task needs what the model cannot do; a live model can do all of them."""

    def load(self) -> None:
        """Read the weights, and the answers of an earlier run."""
        request = self.request
        where = placement(request.dtype, request.device_map, self.processes.device)
        if request.quantization is not None:
            self.quantization = parse_quantization(request.quantization)
        dtype = self._checkpoint_dtype if where["dtype"] == "auto" else where["dtype"]
        quantized = loading_arguments(self.quantization, dtype)
        # The plain form of a model that was saved with a patch has that patch.
        self.model = (read_model if patch_to_restore(self.path) is None else load)(
            self.path, **where, gguf_file=request.gguf_file, **quantized
        )
        quantize(self.model, self.quantization)
        RowsGuard.install(self.model)
        self.weights = weights = provenance.fingerprint(self.model)
        self.code = code_identity(self.model)
        cache, config = request.folder / CACHE, provenance.config_fingerprint(self.model.config)
        self._other_config = self.processes.run_on_main(
            lambda: find_other_config(cache, weights, config)
        )
        self.answers = AnswerStore(cache, self.processes.rank, self.processes.size)
        self.continued = len(self.answers) > 0

    @property
    def rotation_patch(self) -> Patch | None:
        """Return the handle of the rotation's patch that is in effect."""
        return patching.current(self.model)

    @property
    def evaluator(self) -> str:
        """Return what finds key tokens, in words: the model before it is patched."""
        handle = self.rotation_patch  # not None if the model was saved with a patch
        return "the plain model" if handle is None else str(handle.method)

    def model_facts(self) -> ModelFacts:
        """Return those parts of a run's metadata that are about the model."""
        name = demo.NAME if self.request.model == "demo" else Path(self.request.model).name
        return {
            "name": f"{name}, {self.quantization}" if self.quantization else name,
            "architecture": type(self.model).__name__,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "quantization": self.quantization,
            "attention": attention_implementation(self.model.config),
            "device": str(self.model.device),
            "peak_memory": provenance.peak_memory(),
            "hardware": provenance.hardware(),
        }

    @contextlib.contextmanager
    def patched(self, method: str) -> Iterator[str]:
        """Patch the model with a method; yield the label of its results."""
        undo = method != BASELINE
        if undo:
            patch(self.model, self.request.extension(method))
        handle = current(self.model)
        label = _label(handle)
        if label not in self.methods:
            self.methods[label] = _describe_method(label, handle, self.request.longest)
        try:
            yield label
        finally:
            if undo and (handle := current(self.model)):
                handle.undo()

    @contextlib.contextmanager
    def timer(self, part: str) -> Iterator[None]:
        """Add the time until the end of the block to `seconds`."""
        started, self._part = time.monotonic(), part
        yield
        self.seconds[part] = self.seconds.get(part, 0) + time.monotonic() - started
        self._part = ""

    @contextlib.contextmanager
    def language_model(self, place: str, longest: int = 0) -> Iterator[LongContextLM]:
        """Yield the present model for lm-eval; count the tokens that it reads.

        Args:
            place: The label on the progress bar.
            longest: Tokens of the longest sample; at least those of our samples.
        """
        lm = LongContextLM(
            self.model,
            self.tokenizer,
            max(longest, self.request.longest, self.trained_length),
            {"model": self.request.model, "weights": self.weights},
            answers=self.answers,
            identity=self.identity,
            share=self.request.share,
            label=place,
            processes=self.processes,
        )
        yield lm
        self.tokens["asked"] += lm.prompt_tokens
        self.tokens["read"] += lm.computed_tokens
        self._add_seconds(lm.stored_seconds, lm.earlier_seconds)

    def compute_cached(self, pieces: Sequence[CachedComputation[T]]) -> list[T]:
        """Return the values of all pieces; compute those that no earlier run left."""
        keys = [answer_key(self.identity(p.length, p.length), p.identity) for p in pieces]
        by_key = dict(zip(keys, pieces, strict=True))

        def find_missing() -> list[str]:
            again = partial(self.run_folder.find, again="measured again", format=_FORMAT)
            return [key for key in by_key if again(_piece_file(key), key=key) is None]

        missing = self.processes.run_on_main(find_missing)  # others may already see new files
        mine = self.processes.own_share(missing, lambda key: by_key[key].length)
        self._compute({key: by_key[key] for key in mine})
        self.processes.wait()
        stored = {
            key: self.run_folder.read(_piece_file(key), format=_FORMAT, key=key) for key in by_key
        }
        seconds = {key: piece.get("seconds", 0.0) for key, piece in stored.items()}
        new = [key for key in stored if key not in self._pieces]
        earlier = [key for key in new if key not in missing]
        self._pieces.update(new)
        self.continued = self.continued or bool(earlier)
        self._add_seconds(sum(seconds[key] for key in new), sum(seconds[key] for key in earlier))
        return [stored[key]["value"] for key in keys]

    def _compute(self, pieces: Mapping[str, CachedComputation[Any]]) -> None:
        """Compute and store pieces, one after another."""
        for key, piece in pieces.items():
            self._compute_one(key, piece)

    def _compute_one(self, key: str, piece: CachedComputation[Any]) -> None:
        started = time.monotonic()
        body = {"format": _FORMAT, "key": key, "value": piece.compute()}
        body["seconds"] = time.monotonic() - started
        self.run_folder.write(_piece_file(key), body)

    def _add_seconds(self, stored: float, earlier: float) -> None:
        """Add the time that is stored with results, and that of those which an earlier run left."""
        self.earlier_seconds += earlier
        if self._part:
            self.seconds[self._part] = self.seconds.get(self._part, 0) + earlier
            self.stored_seconds[self._part] = self.stored_seconds.get(self._part, 0) + stored

    def try_compute_cached(
        self, name: str, pieces: Sequence[CachedComputation[T]]
    ) -> list[T] | None:
        """Return the values of all pieces; if one fails, return None and note the failure."""
        return self.try_measure(name, partial(self.compute_cached, pieces))

    def try_measure(self, name: str, measure: Callable[[], T]) -> T | None:
        """Return what `measure` returns, or None and note the failure in `not_run`."""
        try:
            return measure()
        except self.aborting:
            raise
        except Exception as error:
            if self.processes.size > 1:
                raise  # the others wait for this one
            self.not_run.append(f"{name}: {describe_error(error)}")
            return None

    def identity(self, length: int, end: int) -> dict[str, Any]:
        """Return what an answer depends on besides the prompt; equal for equal rotations.

        Many methods rotate a prompt alike, and equal rotations share an answer. Up to the trained
        length, all dynamic methods rotate as the unpatched model. Beyond it, most rotate as a
        static method with the factor that they have reached.

        Args:
            length: Tokens that the model reads at once and rotates alike.
            end: Tokens in the end, with the answer.
        """
        handle = current(self.model)
        return {
            "weights": self.weights,
            "dtype": str(self.model.dtype),
            "device": self.model.device.type,
            "attention": attention_implementation(self.model.config),
            "rotation": None if handle is None else rotation_identity(handle, length, end),
            "trained_length": self.trained_length,
            "versions": self._versions,
            # Only where there is one, so that earlier runs' answers keep their keys.
            **({"quantization": self.quantization} if self.quantization else {}),
            **self.code,
            **({"config": self._other_config} if self._other_config else {}),
        }


def find_other_config(folder: Path, weights: str, config: str) -> str | None:
    """Return a config's fingerprint unless it is the first one that a folder saw with some weights.

    Weights do not say what rotates them: the same ones under a config that was edited (another
    theta, a scaling) answer otherwise. Answers of the first config keep the keys without one, as
    earlier releases wrote them.

    Args:
        folder: The folder of answers, whose first configs are a line each in a file.
        weights: The fingerprint of the weights.
        config: The fingerprint of the config that they are used with now.
    """
    file = JournalFile(folder / "configs.jsonl")
    stored = check_lines(file.lines())
    for entry in stored.entries:
        if entry["weights"] == weights:
            return None if entry["config"] == config else config
    if stored.flaws:
        logger.warning("%s is damaged: earlier answers may not be found again", file.path)
        return config  # which config came first is not known, so none shares its answers
    if not stored.entries and any(folder.glob("answers-*.jsonl")):
        logger.warning(
            "%s holds answers of an earlier release, which did not note the config: they count as "
            "answers under the config of now. If it was edited since, give another folder",
            folder,
        )
    file.append(checksums.seal({"weights": weights, "config": config}))
    return None


def _piece_file(key: str) -> str:
    return f"{CACHE}/piece-{key}.json"


def _label(handle: Patch | EncodingPatch | None) -> str:
    """Return the label of a patch's results."""
    if isinstance(handle, EncodingPatch):
        return encoding_label(handle)
    return BASELINE if handle is None else str(handle.method)


def rotation_identity(handle: Patch | EncodingPatch, length: int, end: int) -> Any:
    """Return what rotates a sequence; None for the model's own rotation."""
    if isinstance(handle, EncodingPatch):
        return encoding_identity(handle)
    # Asked for by name, kernels round in their own way: the same numbers give other bits.
    kernels = [] if handle.extension.kernels == "auto" else [handle.extension.kernels]
    if handle.method.valid_until(max(length, 1), handle.trained_length) < end:
        changing = [handle.method.name, handle.method.options(), *kernels]  # changes on the way
        extension = handle.extension
        is_ours = method_origin(handle.method) is None
        if is_ours and extension.start == "unscaled" and extension.layer_types is None:
            return changing
        # Another file may compute other numbers under the same name, a scaling of the config's may
        # lie below them, or layers of some types may change alone.
        return [*changing, *(_number_lists(handle.frequencies_at(n)) for n in (1, length, end))]
    changed = {
        layer_type: frequencies
        for layer_type, frequencies in handle.frequencies_at(length).items()
        if not frequencies.close_to(handle.original_frequencies[layer_type])
    }
    rotation: dict[str, Any] = dict(_number_lists(changed))
    rotation |= handle.method.attention_changes(end, handle.trained_length)
    if rotation and handle.method.start_token_count:
        rotation["kept tokens"] = handle.method.start_token_count
    rounds_otherwise = bool(kernels) if rotation else not _keeps_bits(handle)
    if rounds_otherwise:
        rotation["kernels"] = handle.extension.kernels
    return rotation or None


def _keeps_bits(handle: Patch) -> bool:
    """Return whether texts with the plain model's rotation get its bits, not another rounding."""
    if handle.extension.kernels != "auto":
        return handle.extension.kernels == "hf"
    method = unwrap(handle.method)
    follows = method.is_length_dependent(handle.trained_length) or isinstance(method, PositionMap)
    return follows or not torch.cuda.is_available()


def _number_lists(frequencies: Mapping[str | None, Frequencies]) -> dict[str, list[float]]:
    # Not `Frequencies.key`: stored answers are found again under the numbers as they were written.
    return {
        layer_type or "all": [each.attention_factor, *each.inv_freq.tolist()]
        for layer_type, each in frequencies.items()
    }


def _describe_method(
    label: str, handle: Patch | EncodingPatch | None, longest: int
) -> MethodRecord:
    if handle is None:
        return {"label": label, "method": None}
    if isinstance(handle, EncodingPatch):
        return {
            "label": label,
            "method": handle.method,
            "factor": handle.factor,
            "length": handle.length,
            "follows_length": False,
            "options": {},
            "rope_parameters": {},
        }
    # Record a dynamic method's frequencies at the evaluation's longest length.
    frequencies_by_type = (
        handle.frequencies_at(longest) if handle.method.is_dynamic else handle.frequencies
    )
    return {
        "label": label,
        "method": handle.method.name,
        "paper": handle.method.paper,
        "factor": handle.factor,
        "length": handle.length,
        "follows_length": handle.method.is_length_dependent(handle.trained_length),
        "options": handle.method.options(),
        "rope_parameters": {
            layer_type or "all": handle.method.rope_parameters(geometry)
            for layer_type, geometry in handle.geometries.items()
        },
        "frequencies": {
            layer_type or "all": {
                "unscaled": handle.geometries[layer_type].inv_freq().tolist(),
                "inv_freq": frequencies.inv_freq.tolist(),
                "attention_factor": frequencies.attention_factor,
            }
            for layer_type, frequencies in frequencies_by_type.items()
        },
    }
