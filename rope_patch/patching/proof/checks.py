"""What a patch must keep to, checked on tiny models: one function for each property.

A property that compares logits is measured without a patch first. What transformers itself does not
keep to there (a cache that takes no chunks, a forward without positions) is not asked of a patch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rope_patch.extension import Extension
from rope_patch.methods.base import Frequencies, Rotation
from rope_patch.methods.position_map import PositionMap
from rope_patch.patching.handle import Patch
from rope_patch.patching.method_wrappers import unwrap
from rope_patch.patching.plan import PatchPlan
from rope_patch.patching.proof.tiny_model import FIRST_TOKEN, VOCABULARY, CannotShrink
from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.transformers_api.caches import cache_in_output
from rope_patch.transformers_api.forwards import MASK, cache_arguments
from rope_patch.utils.errors import Refused, describe_error

OK, WRONG, REFUSED, NOT_ASKED = "ok", "wrong", "refused", "not asked"

# Largest difference of logits that is rounding, in their standard deviation. Another rotation moves
# the logits of a tiny model by about 1, and another order of sums by less than 1e-4.
LIMIT = 1e-3

# The kinds of methods, and the request that stands for each. Methods of one kind share all code but
# their formula, which sees no model. `start tokens` needs one number for each rotated pair.
STATIC, DYNAMIC, TWO_SETS = "static", "dynamic", "two sets"
MAP, TEMPERATURE, START = "position map", "temperature", "start tokens"
KINDS = (STATIC, DYNAMIC, TWO_SETS, MAP, TEMPERATURE, START)
_REQUESTS = {
    STATIC: Extension("yarn", factor=4),
    DYNAMIC: Extension("dynamic-yarn"),
    TWO_SETS: Extension("mixed-yarn", factor=4),
    MAP: Extension("self-extend"),
    TEMPERATURE: Extension("linear", factor=4, options={"temperature": "log-n"}),
}

# What has to be asked: without it, a passed proof would say nothing of caches.
ESSENTIAL = "cached steps equal one pass"

_STEPS = 6  # tokens that are decoded one by one
_CHUNKS = (5, 7)  # tokens that are read together behind others
_STRETCH = sum(_CHUNKS)  # tokens over which a growing rotation must stay the same
_LONGEST_TRAINED = 256  # tokens; a tiny model that was trained on more is not tiny

PatchFunction = Callable[[Any, Extension], Patch]


def kinds_of(plan: PatchPlan) -> tuple[str, ...]:
    """Return the kinds of methods whose code a plan uses."""
    if plan.position_map is not None:
        return (MAP,)
    kinds = [STATIC]
    if plan.length_hooks:
        kinds = [DYNAMIC if plan.method.is_dynamic else TWO_SETS]
    if plan.method.query_temperature is not None:
        kinds.append(TEMPERATURE)
    if plan.method.start_token_count:
        kinds.append(START)
    return tuple(kinds)


@dataclass(frozen=True)
class Check:
    """One property of a patched tiny model.

    Attributes:
        name: The property, as a sentence.
        verdict: "ok", "wrong", "refused", or "not asked", where the unpatched model lacks it, too.
        error: The largest difference of logits, in their standard deviation, where it is measured.
        problem: What is wrong, or why it is not asked.
    """

    name: str
    verdict: str
    error: float | None = None
    problem: str = ""


class Lengths(NamedTuple):
    """Lengths of texts, in tokens.

    Attributes:
        trained: What the model was trained on.
        start: The first of some lengths beyond it that have one rotation.
        stop: The last of them.
    """

    trained: int
    start: int
    stop: int


class _NoCache(Exception):
    """A model returns no cache."""


@dataclass
class Subject:
    """A tiny model and the texts that it reads.

    Attributes:
        model: The tiny model.
        baselines: The error of each measure without a patch, or why it cannot be measured.
    """

    model: Any
    baselines: dict[Hashable, float | str] = field(default_factory=dict)

    def text(self, length: int, row: int = 0) -> torch.Tensor:
        """Return random tokens, `[1, S]`; a shorter text of the same row is its beginning."""
        generator = torch.Generator().manual_seed(row)
        ids = torch.randint(FIRST_TOKEN, VOCABULARY, (1, 1024), generator=generator)
        return ids[:, :length]

    def read(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the logits of a text in one pass, without a cache."""
        return _logits(self.model(input_ids=ids, use_cache=False, **kwargs))

    def read_on(self, cache: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Read tokens behind those of a cache (None: none), and return cache and logits."""
        kwargs |= cache_arguments(self.model, cache)
        output = self.model(input_ids=ids, use_cache=True, **kwargs)
        if (cache := cache_in_output(output)) is None:
            raise _NoCache(f"{type(self.model).__name__} returns no cache")
        return cache, _logits(output)

    def read_in_parts(
        self, ids: torch.Tensor, parts: tuple[int, ...], mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of a text that is read part by part, with a cache."""
        cache, logits, stop = None, [], 0
        for part in parts:
            start, stop = stop, stop + part
            # Without positions: the rule that reads padding from the mask is proven, too.
            kwargs = {} if mask is None else {MASK: mask[:, :stop]}
            cache, new = self.read_on(cache, ids[:, start:stop], **kwargs)
            logits.append(new)
        return torch.cat(logits, 1)

    def state(self) -> dict[str, Any]:
        """Return what undoing a patch must restore, besides logits."""
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        hooks = {
            name: (
                len(module._forward_pre_hooks),
                len(module._forward_hooks),
                "forward" in vars(module),
            )
            for name, module in self.model.named_modules()
        }
        return {"buffers": buffers, "hooks": hooks, "config": self.model.config.to_dict()}


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def run_checks(
    tiny: Subject,
    shallow: Callable[[], Subject | None],
    request: Extension,
    patch: PatchFunction,
) -> Iterator[Check]:
    """Yield the checks of all properties of a patch.

    Args:
        tiny: A tiny model, unpatched, and unpatched afterwards.
        shallow: A function that makes one whose extended layer comes last, if it can.
        request: The patch's request, such as `make_request` returns for a kind of methods.
        patch: The function that patches.

    Raises:
        Refused: The patch is refused.
        CannotShrink: The tiny model's lengths are not those of a tiny model.
    """
    other = Extension("linear", factor=3)
    handle = patch(tiny.model, request)
    lengths = _lengths(handle)
    follows = handle.is_length_dependent
    keeps_short = _promises_short(handle) and not _replaces_scaling(handle)
    handle.undo()
    long, short = tiny.text(lengths.stop), tiny.text(lengths.trained // 2)
    try:
        before = (tiny.read(long), tiny.read(short), tiny.state())
    except Exception as error:  # a table of positions that ends before
        raise CannotShrink(f"it does not read {lengths.stop} tokens: {error}") from error
    compared: list[tuple[str, Callable[..., float], tuple[Any, ...]]] = [
        (ESSENTIAL, _parts_error, (_steps(lengths),)),
        ("cached chunks equal one pass", _parts_error, (_chunks(lengths, follows),)),
        ("later tokens change nothing before them", _causal_error, ()),
        ("rows padded on the left equal rows alone", _padded_error, ("left",)),
        ("rows padded on the right equal rows alone", _padded_error, ("right",)),
        ("padded rows decode as rows alone", _padded_steps_error, ()),
    ]
    if getattr(tiny.model, "can_generate", bool)():
        compared.append(("generate takes the likeliest tokens", _generated_error, ()))
    for _, measure, arguments in compared:
        _measure_baseline(tiny, measure, lengths, *arguments)
    foreign = {"the unpatched model": _filled_cache(tiny, lengths)}
    with contextlib.suppress(Refused), patch(tiny.model, other):
        foreign["another patch"] = _filled_cache(tiny, lengths)

    handle = _patch_again(tiny, request, patch)
    try:
        patched_long, patched_short = tiny.read(long), tiny.read(short)
        yield _changed(patched_long, before[0])
        for name, measure, arguments in compared:
            yield _compare(name, tiny, measure, lengths, *arguments)
        for source, cache in foreign.items():
            yield _foreign_refused(f"a cache of {source} is refused", tiny, cache, lengths)
        if keeps_short:
            yield _same_bits("short texts keep their bits", patched_short, before[1])
    finally:
        handle.undo()
    yield _undone(tiny, long, short, before)
    if follows:
        yield _follow(shallow(), lengths, request, patch)


def _patch_again(tiny: Subject, request: Extension, patch: PatchFunction) -> Patch:
    """Patch a tiny model that was patched in the same way and restored."""
    try:
        return patch(tiny.model, request)
    except Refused as refusal:
        raise RuntimeError(f"is refused after it was undone once: {refusal}") from refusal


def make_request(tiny: Subject, kind: str, patch: PatchFunction) -> Extension:
    """Return the request that stands for a kind of methods."""
    if kind != START:
        return _REQUESTS[kind]
    handle = patch(tiny.model, _REQUESTS[STATIC])
    pairs = next(iter(handle.geometries.values())).rotary_dim // 2
    handle.undo()
    stretches = [1.0 + 3.0 * pair / pairs for pair in range(pairs)]
    options = {"long_factor": stretches, "short_factor": stretches, "start_tokens": 4}
    return Extension("longrope", factor=4, options=options)


def _lengths(handle: Patch) -> Lengths:
    """Return lengths beyond the trained one, from `start` to `stop`, that have one rotation."""
    trained = handle.trained_length
    if trained > _LONGEST_TRAINED:
        raise CannotShrink(f"its trained length stays {trained:,} tokens")
    for start in range(trained + trained // 4, 4 * trained + 4 * _STRETCH):
        first, last = (Rotation(handle.frequencies_at(n)) for n in (start, start + _STRETCH))
        if first.close_to(last):
            return Lengths(trained, start, start + _STRETCH)
    raise CannotShrink("its rotation changes with every token")


def _promises_short(handle: Patch) -> bool:
    """Return whether texts of half the trained length are the plain model's under a patch."""
    position_map = unwrap(handle.method)
    if isinstance(position_map, PositionMap):
        start = position_map.map_start(position_map.reach(handle.trained_length))
        return start >= handle.trained_length // 2  # `string` maps from a third on
    plain = {name: Frequencies(geometry.inv_freq()) for name, geometry in handle.geometries.items()}
    is_plain = Rotation(handle.frequencies_at(1)).close_to(Rotation(plain))
    # The short set of a `longrope` may be stretched; what follows the length starts unstretched.
    return handle.is_length_dependent and (handle.method.is_dynamic or is_plain)


def _replaces_scaling(handle: Patch) -> bool:
    """Return whether the patch replaces the config's own scaling, for short texts, too."""
    parameters = by_layer_type(handle.original_config.rope_parameters)
    return any(
        config_rope_type(parameters[layer_type]) != "default" and not geometry.base
        for layer_type, geometry in handle.geometries.items()
    )


def _filled_cache(tiny: Subject, lengths: Lengths) -> Any:
    """Return a cache of all but the last token of a text; None if it cannot be continued."""
    if isinstance(tiny.baselines[(_parts_error, lengths, (_steps(lengths),))], str):
        return None
    return tiny.read_on(None, tiny.text(lengths.start)[:, :-1])[0]


# -- what is measured ------------------------------------------------------------------------------


def _steps(lengths: Lengths) -> tuple[int, ...]:
    return (lengths.stop - _STEPS, *[1] * _STEPS)


def _chunks(lengths: Lengths, follows: bool) -> tuple[int, ...]:
    """Return parts of a text; of a rotation that follows the length, behind its last change."""
    half = lengths.trained // 2
    first = (lengths.start,) if follows else (half, lengths.start - half)
    return (*first, *_CHUNKS)


def _parts_error(tiny: Subject, lengths: Lengths, parts: tuple[int, ...]) -> float:
    ids = tiny.text(lengths.stop)
    return _error(tiny.read_in_parts(ids, parts), tiny.read(ids))


def _causal_error(tiny: Subject, lengths: Lengths) -> float:
    """Return the error of tokens behind which others follow, of the same number."""
    ids, others = tiny.text(lengths.stop), tiny.text(lengths.stop, 1)
    changed = torch.cat([ids[:, : lengths.start], others[:, lengths.start :]], 1)
    return _error(tiny.read(changed)[:, : lengths.start], tiny.read(ids)[:, : lengths.start])


def _padded_error(tiny: Subject, lengths: Lengths, side: str) -> float:
    texts = enumerate((lengths.stop, lengths.trained // 2, lengths.start))
    rows = [tiny.text(length, row) for row, length in texts]
    ids, mask = _pad(rows, side)
    return _rows_error(tiny, rows, mask, tiny.read(ids, **{MASK: mask}))


def _padded_steps_error(tiny: Subject, lengths: Lengths) -> float:
    rows = [tiny.text(lengths.stop), tiny.text(lengths.start + _STEPS, 1)]
    ids, mask = _pad(rows, "left")
    return _rows_error(tiny, rows, mask, tiny.read_in_parts(ids, _steps(lengths), mask))


def _generated_error(tiny: Subject, lengths: Lengths) -> float:
    """Return how much less likely than the likeliest a generated token is, at most."""
    prompt = tiny.text(lengths.stop - _STEPS)
    ids = tiny.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_STEPS,
        do_sample=False,
        num_beams=1,
    )
    logits = tiny.read(ids)[:, prompt.shape[1] - 1 : -1]
    chosen = logits.gather(-1, ids[:, prompt.shape[1] :, None])[..., 0]
    return float((logits.amax(-1) - chosen).max() / logits.std())


def _growth_error(shallow: Subject, lengths: Lengths) -> float:
    """Return the error of tokens behind cached ones that were rotated otherwise when they came."""
    # The layer that is extended comes last, so that its inputs are the same in one pass: all of the
    # difference is in its keys.
    first = lengths.trained - 4
    parts = (first, *[1] * 8, lengths.start - first - 8, 1, 3)
    ids, cache, stop, worst = shallow.text(sum(parts)), None, 0, 0.0
    for part in parts:
        start, stop = stop, stop + part
        cache, logits = shallow.read_on(cache, ids[:, start:stop])
        if start and (part > 1 or stop in (lengths.trained + 1, lengths.start + 1)):
            worst = max(worst, _error(logits, shallow.read(ids[:, :stop])[:, start:]))
    return worst


def _pad(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        tokens = row.shape[1]
        columns = slice(length - tokens, None) if side == "left" else slice(tokens)
        ids[i, columns], mask[i, columns] = row[0], 1
    return ids, mask


def _rows_error(
    tiny: Subject, rows: list[torch.Tensor], mask: torch.Tensor, got: torch.Tensor
) -> float:
    return max(
        _error(logits[is_token], tiny.read(row)[0])
        for row, is_token, logits in zip(rows, mask.bool(), got, strict=True)
    )


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in the standard deviation of what is expected."""
    error = (got - expected).abs().max() / expected.std()
    return float(error.nan_to_num(torch.inf))


# -- verdicts --------------------------------------------------------------------------------------


def _measure_baseline(
    subject: Subject, measure: Callable[..., float], lengths: Lengths, *arguments: Any
) -> None:
    """Measure what the unpatched model keeps to, once."""
    key = (measure, lengths, arguments)
    if key not in subject.baselines:
        try:
            subject.baselines[key] = measure(subject, lengths, *arguments)
        except Exception as error:  # transformers' own limits
            subject.baselines[key] = describe_error(error)


def _compare(
    name: str,
    subject: Subject,
    measure: Callable[..., float],
    lengths: Lengths,
    *arguments: Any,
) -> Check:
    """Check a difference of logits, unless the unpatched model has it, too."""
    own = subject.baselines[(measure, lengths, arguments)]
    if isinstance(own, str) or own > LIMIT:
        problem = own if isinstance(own, str) else f"its logits are off by {own:.2g}"
        return Check(name, NOT_ASKED, problem=f"the unpatched model lacks it, too: {problem}")
    try:
        error = measure(subject, lengths, *arguments)
    except Refused as refusal:
        return Check(name, REFUSED, problem=describe_error(refusal))
    except Exception as raised:  # our hooks raise, or what they run
        return Check(name, WRONG, problem=describe_error(raised))
    if error <= LIMIT:
        return Check(name, OK, error)
    problem = f"logits are off by {error:.2g} of their standard deviation, not {LIMIT:g}"
    return Check(name, WRONG, error, problem)


def _changed(patched: torch.Tensor, unpatched: torch.Tensor) -> Check:
    name = "the patch acts"
    if not torch.isfinite(patched).all():
        return Check(name, WRONG, problem="logits of a long text are not finite")
    if _error(patched, unpatched) < LIMIT:
        return Check(name, WRONG, problem="logits of a long text are the unpatched model's")
    return Check(name, OK)


def _foreign_refused(name: str, tiny: Subject, cache: Any, lengths: Lengths) -> Check:
    if cache is None:
        return Check(name, NOT_ASKED, problem="the model has no cache that it continues")
    ids = tiny.text(lengths.start)
    try:
        _, logits = tiny.read_on(cache, ids[:, -1:])
    except Refused:
        return Check(name, OK)
    except Exception as raised:
        return Check(name, WRONG, problem=describe_error(raised))
    error = _error(logits, tiny.read(ids)[:, -1:])
    problem = f"it is taken, and logits are off by {error:.2g} of their standard deviation"
    return Check(name, WRONG, error, problem)


def _same_bits(name: str, got: torch.Tensor, expected: torch.Tensor) -> Check:
    if torch.equal(got, expected):
        return Check(name, OK)
    error = _error(got, expected)
    problem = f"logits are off by {error:.2g} of their standard deviation, not 0"
    return Check(name, WRONG, error, problem)


def _undone(
    tiny: Subject,
    long: torch.Tensor,
    short: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor, dict[str, Any]],
) -> Check:
    name = "undoing restores the bits"
    state = tiny.state()
    buffers = state.pop("buffers")
    for key, old in before[2].pop("buffers").items():
        if key not in buffers or not torch.equal(buffers[key], old):
            return Check(name, WRONG, problem=f"the buffer {key} is another one")
    for key, old in before[2].items():
        if state[key] != old:
            return Check(name, WRONG, problem=f"{key} differ from those before the patch")
    for ids, old in ((long, before[0]), (short, before[1])):
        check = _same_bits(name, tiny.read(ids), old)
        if check.verdict != OK:
            return check
    return Check(name, OK)


def _follow(
    shallow: Subject | None, lengths: Lengths, request: Extension, patch: PatchFunction
) -> Check:
    name = "cached keys follow a growing text"
    if shallow is None:
        return Check(name, NOT_ASKED, problem="its extended layers cannot be put last")
    _measure_baseline(shallow, _growth_error, lengths)
    try:
        handle = patch(shallow.model, request)
    except Refused as refusal:
        return Check(name, NOT_ASKED, problem=describe_error(refusal))
    try:
        return _compare(name, shallow, _growth_error, lengths)
    finally:
        handle.undo()
