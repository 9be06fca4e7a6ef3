"""`verify`: compare a running engine with transformers under every hypothesis."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rope_patch.extension import Extension
from rope_patch.patching.length_warning import silence_length_warnings
from rope_patch.transformers_api.remote_code import remote_code
from rope_patch.units import parse_tokens
from rope_patch.utils.terminal import progress_bar
from rope_patch.verifying.asked_rotation import AskedRotation
from rope_patch.verifying.clients import CannotReach, CannotVerify, Engine, Observation
from rope_patch.verifying.engine_detection import open_engine
from rope_patch.verifying.hypotheses import AS_ASKED, BY_REQUEST, Hypothesis, make_hypotheses
from rope_patch.verifying.probe_prompts import ProbePrompt, PromptMaker, make_prompt_maker
from rope_patch.verifying.reference import Reference, Subject, measure_noise, open_subject
from rope_patch.verifying.verdict import Evidence, Verdict, judge, needs_no_more
from rope_patch.verifying.verification import Verification, VerifyRequest

logger = logging.getLogger("rope_patch")

_WRITTEN = 64  # tokens that an engine writes, across the trained length
_SLOW_TOKENS = 24  # scored tokens of a prompt, where each costs a request


def verify(
    model_or_url: Any,
    *,
    against: Any,
    method: str | Extension | None = None,
    factor: float | str | None = None,
    length: int | str | None = None,
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    anyway: bool = False,
    engine: str = "auto",
    served_model: str | None = None,
    tokens: int | str | None = None,
    seconds: float = 600.0,
    seed: int = 0,
    progress: bool = True,
    dtype: Any = "auto",
    device_map: Any = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Verification:
    """Find out whether a running engine rotates as asked, from its log-probabilities.

    Prompts go to the engine and through transformers, once for each rotation that the engine may
    have. The verdict names the rotation that explains the engine's numbers.

    Args:
        model_or_url: The engine's address, such as http://localhost:8000; a folder or a GGUF file;
            or a live model.
        against: What it serves: a folder, a name on the Hub, `demo`, or another live model. A live
            model that is patched counts as asked for, and so does a folder that `save` wrote.
        method: A name from `rope_patch.list_methods()`, or a whole request, an `Extension`. Left
            out, the engine should rotate as `against` does.
        factor: See `patch`.
        length: See `patch`.
        trained_length: See `patch`.
        layer_types: See `patch`.
        start: See `patch`.
        anyway: See `patch`.
        engine: The engine's API: "auto" or one of `rope_patch.verifying.engine_detection.ENGINES`.
        served_model: The served model's name, where a server has several.
        tokens: Tokens of the longest prompt. A little more than the trained length unless given,
            at most 4,096.
        seconds: Time budget.
        seed: Another seed makes other prompts.
        progress: Show a progress bar.
        dtype: Of the reference, as in transformers. float32 is best, whatever the engine has.
        device_map: As in transformers.
        gguf_file: The GGUF file within `against`.
        trust_remote_code: Whether to execute Python code that `against` brings, or a folder that is
            verified.
        **options: The method's options.

    Returns:
        The verdict: `.status` is "as-asked", "another" or "cannot-tell".

    Raises:
        ValueError: The engine cannot be reached, gives no log-probabilities, or serves another
            model; or the request cannot be met.
    """
    began = time.monotonic()
    request = VerifyRequest(
        tokens=parse_tokens("tokens", tokens), seconds=seconds, seed=seed, progress=progress
    )
    extension = None
    if method is not None:
        extension = Extension.of(
            method,
            factor=factor,
            length=length,
            trained_length=trained_length,
            layer_types=layer_types,
            start=start,
            anyway=anyway,
            **options,
        )
    elif factor is not None or length is not None or options:
        raise CannotVerify(
            "factor, length and options belong to a method, expected one: name it, for example "
            "method='yarn', or leave them out to ask for the checkpoint's own rotation"
        )
    loading = {"dtype": dtype, "device_map": device_map}
    with _without_log_of_patches(), remote_code(against, trust_remote_code):
        client = open_engine(model_or_url, engine, served_model, seconds, **loading)
        with open_subject(
            against, extension, model_or_url, gguf_file=gguf_file, **loading
        ) as subject:
            return _verify_engine(client, subject, request, began)


def _verify_engine(
    engine: Engine, subject: Subject, request: VerifyRequest, began: float
) -> Verification:
    asked = AskedRotation.of(subject.model, subject.extension)
    maker = make_prompt_maker(asked.config, subject.tokenizer, request.seed)
    return _Run(engine, Reference(subject.model, asked), maker, request, began).verification()


@contextmanager
def _without_log_of_patches() -> Iterator[None]:
    """Leave the patches that hypotheses are made of out of the log, and their length warnings."""

    def is_told(record: logging.LogRecord) -> bool:
        return record.funcName != "patch_rotation"

    logger.addFilter(is_told)
    try:
        with silence_length_warnings():
            yield
    finally:
        logger.removeFilter(is_told)


class _Run:
    """One verification: rounds of prompts until the verdict is final or time is up."""

    def __init__(
        self,
        engine: Engine,
        reference: Reference,
        maker: PromptMaker,
        request: VerifyRequest,
        began: float,
    ) -> None:
        self.engine, self.reference, self.maker = engine, reference, maker
        self.request, self.began = request, began
        asked = reference.asked
        self.longest = request.longest(asked.trained_length, asked.target_length, engine.max_length)
        self.hypotheses = make_hypotheses(asked, self.longest)
        self.untested = self._find_untested(asked)
        self.evidence = Evidence()
        self.open: list[Hypothesis] = []
        self.bar = progress_bar(
            total=len(self.hypotheses) * len(self._first_round()),
            desc=f"{len(self.hypotheses)} hypotheses",
            disable=not request.progress,
        )

    def verification(self) -> Verification:
        """Return the result."""
        noise = measure_noise(self.engine, self.reference, self.maker, self.hypotheses)
        written = self._written()
        self.open = list(self.hypotheses)
        verdict = None
        with self.bar:
            if written is not None:
                self._add(written.prompt, 0, written)
            for number in range(self.request.rounds):
                started = time.monotonic()
                prompts = self._first_round() if verdict is None else self._next(verdict)
                for left, prompt in zip(itertools.count(len(prompts) - 1, -1), prompts):
                    if self._is_over():
                        break
                    try:
                        self._add(self.maker.make(*prompt), left)
                    except CannotReach:
                        if not self._is_over():
                            raise
                        break  # the deadline came amid an answer: those before it decide
                verdict = judge(self.evidence, noise)
                logger.debug("round %d: %s", number + 1, verdict)
                took = time.monotonic() - started
                if (verdict.is_final and number) or self._is_over(took):
                    break
        assert verdict is not None
        return Verification(
            engine=self.engine.name,
            asked=self.reference.asked.name,
            verdict=verdict,
            hypotheses=tuple(self.hypotheses),
            untested=self.untested,
            prompts=len(self.evidence.prompts),
            tokens=self.evidence.tokens,
            readings=self.evidence.readings,
            longest=self.longest,
            seconds=time.monotonic() - self.began,
        )

    def _find_untested(self, asked: AskedRotation) -> dict[str, str]:
        untested = {}
        if any(traits.is_mrope for traits in asked.traits):  # exllamav3 #332, LightLLM #1582
            untested["the sections of M-RoPE"] = (
                "prompts are text, whose tokens have one position on all axes"
            )
        if self.longest > asked.trained_length or asked.target_length <= asked.trained_length:
            return untested
        limit, needed = self.engine.max_length, asked.trained_length * 5 // 4
        why = (
            f"prompts are shorter; --tokens {needed} tests it"
            if limit is None or limit > needed
            else f"the engine accepts {limit:,} tokens"
        )
        untested["a table of cos and sin that ends at the trained length"] = why
        if asked.is_length_dependent:
            untested["a rotation that does not follow the length"] = why
        return untested

    def _first_round(self) -> list[tuple[str, int]]:
        short = max(2, min(self.longest, self.reference.asked.trained_length) // 2)
        # The short one first: it is cheap, and most hypotheses are ruled out by it.
        return [("near", short), *((kind, self.longest) for kind in self.maker.kinds)]

    def _next(self, verdict: Verdict) -> list[tuple[str, int]]:
        """Return the prompts that tell the remaining hypotheses apart best, twice."""
        rivals = [name for name in self.evidence.predicted if name != verdict.closest]
        names = [name for name in rivals if name not in verdict.ruled_out] or rivals
        kinds = self.maker.kinds
        best = max(kinds, key=lambda kind: self.evidence.separation(kind, names, verdict.closest))
        return [(best, self.longest), (best, self.longest)]

    def _add(self, prompt: ProbePrompt, left: int, observation: Observation | None = None) -> None:
        """Ask the engine about a prompt, and read it under the open hypotheses."""
        predictions = {}
        if observation is None and not self.engine.is_slow:
            observation = self.engine.observe(prompt)  # first: a refusal costs no computation
        self.bar.total = self.bar.n + (left + 1) * len(self.open)  # `left` prompts follow it
        for hypothesis in self.open:
            predictions[hypothesis.name] = self.reference.log_probs(hypothesis, prompt)
            self.bar.update()
        if observation is None:
            scored = _most_telling(predictions, prompt)
            observation = self.engine.observe(replace(prompt, scored=scored))
        index = {position: i for i, position in enumerate(prompt.scored)}
        answered = [index[position] for position in observation.prompt.scored]
        self.evidence.observe(observation)
        for name, values in predictions.items():
            self.evidence.predict(name, values[answered])
        self._close()

    def _close(self) -> None:
        """Stop reading under the hypotheses that are ruled out; read up on those that are not."""
        while True:
            closest = self.evidence.closest()
            rivals = {
                each.name: self.evidence.compare(each.name, closest) for each in self.hypotheses
            }
            names = {each.name for each in self.hypotheses if not needs_no_more(rivals[each.name])}
            names |= {AS_ASKED, closest}
            if len(names) == 1:  # slow engines are asked where two hypotheses differ
                others = [each.name for each in self.open if each.name != closest]
                names |= {min(others, key=lambda name: rivals[name].distance, default=closest)}
            self.open = [each for each in self.hypotheses if each.name in names]
            behind = [each for each in self.open if self.evidence.unread(each.name)]
            for hypothesis in behind:
                for prompt in self.evidence.unread(hypothesis.name):
                    self.evidence.predict(
                        hypothesis.name, self.reference.log_probs(hypothesis, prompt)
                    )
            if not behind:
                return

    def _written(self) -> Observation | None:
        """Return what the engine writes as a text outgrows the trained length, if that matters."""
        stale = next((each for each in self.hypotheses if each.keeps_stale_keys), None)
        if stale is None:
            return None
        prefill = self.reference.asked.trained_length - _WRITTEN // 8
        why = "prompts are shorter than the trained length"
        if prefill + _WRITTEN <= self.longest:
            ids = self.maker.make("near", prefill).ids
            observation = self.engine.write(ids, _WRITTEN)
            if observation is not None:
                return observation
            why = "the engine does not say which ids it writes"
        self.untested[stale.name] = why
        # Prompts alone are read alike as asked and by request.
        for each in list(self.hypotheses):
            if each is stale or each.name == BY_REQUEST:
                self.hypotheses.remove(each)
        return None

    def _is_over(self, needed: float = 0.0) -> bool:
        """Return whether the time budget is used up, after the first prompt at the earliest."""
        spent = time.monotonic() - self.began + needed
        return bool(self.evidence.prompts) and spent > self.request.seconds


def _most_telling(predictions: dict[str, torch.Tensor], prompt: ProbePrompt) -> tuple[int, ...]:
    """Return the tokens at which the hypotheses, by turns, differ most from "as asked"."""
    asked, *others = predictions.values()
    orders = [(values - asked).abs().argsort(descending=True).tolist() for values in others]
    by_turns = itertools.chain.from_iterable(zip(*orders, strict=True))
    chosen = list(dict.fromkeys(by_turns))[:_SLOW_TOKENS]
    return tuple(prompt.scored[i] for i in sorted(chosen))
