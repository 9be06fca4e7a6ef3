"""Log-likelihoods of samples' scored tokens, and of targets after prompts; no other logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from rope_patch.inference.prefix_reader import PrefixReader, input_device, is_out_of_memory
from rope_patch.inference.samples import Sample
from rope_patch.patching import current
from rope_patch.transformers_api.forwards import cache_arguments

_CPU_BATCH_TOKENS, _GPU_BATCH_TOKENS = 4096, 32768  # tokens of a batch of samples of one length
_MAX_LOGITS = 2**27  # numbers in a batch's logits: 512 MB in float32
_TAIL_CHUNK = 512  # tokens behind a long prompt whose logits exist at once


@dataclass(frozen=True)
class Score:
    """A model's score on one sample.

    Attributes:
        nll: Mean nats for a scored token.
        hits: By answer, whether greedy decoding would write all of it; empty for prose.
    """

    nll: float
    hits: tuple[bool, ...]


class Scorer:
    """Scores samples in fixed units, whichever process scores them and in whatever order.

    Short samples of one length are a batch. Others are read one by one, in chunks, and the common
    prefixes of neighbours in a group once.

    Args:
        model: A transformers causal language model.
        samples: All samples.

    Attributes:
        units: Indices of the samples that are scored together, in the order of the samples.
        tokens_read: Tokens that went through the model so far.
    """

    def __init__(self, model: Any, samples: Sequence[Sample]) -> None:
        self.model = model
        self.samples = samples
        self.tokens_read = 0
        self.units = self._make_units()
        self._chunk: int | None = None  # the reader's own, until memory ran out

    def cost(self, unit: Sequence[int]) -> int:
        """Return about how many tokens a unit has."""
        return sum(self.samples[i].answers[-1][1] for i in unit)

    def score(self, unit: Sequence[int]) -> dict[int, Score]:
        """Score a unit's samples under the model's present patch.

        Returns:
            The scores by index of the sample.
        """
        lengths = {self.samples[i].answers[-1][1] for i in unit}
        if len(unit) > 1 and len(lengths) == 1 and self._batch_size(lengths.pop(), unit) > 1:
            return self._score_batch(unit)
        reader = PrefixReader(self.model, chunk=self._chunk)
        return {i: self._score_single(self.samples[i], reader) for i in unit}

    def _make_units(self) -> list[list[int]]:
        by_length: dict[int, list[int]] = {}
        for i, sample in enumerate(self.samples):
            by_length.setdefault(sample.answers[-1][1], []).append(i)
        units: list[list[int]] = []
        single: dict[int, str] = {}
        for length, numbers in by_length.items():
            size = self._batch_size(length, numbers)
            if size > 1 and len(numbers) > 1:
                units += [numbers[at : at + size] for at in range(0, len(numbers), size)]
            else:
                single |= {i: self.samples[i].group for i in numbers}
        by_group: dict[str, list[int]] = {}
        for i, group in sorted(single.items()):
            by_group.setdefault(group, []).append(i)
        return sorted([*units, *by_group.values()])

    def _batch_size(self, length: int, numbers: Sequence[int]) -> int:
        """Return how many samples of a length are read at once."""
        tokens = _CPU_BATCH_TOKENS if input_device(self.model).type == "cpu" else _GPU_BATCH_TOKENS
        positions = max(len(self.samples[i].positions) for i in numbers)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        return min(tokens // length, _MAX_LOGITS // (positions * vocabulary))

    @torch.no_grad()
    def _score_batch(self, unit: Sequence[int]) -> dict[int, Score]:
        """Score samples of one length in one pass, or in halves if memory runs out."""
        stop = self.samples[unit[0]].answers[-1][1] - 1  # the last token has nothing to predict
        rows = [self.samples[i].ids[:stop] for i in unit]
        logit_positions = sorted({p - 1 for i in unit for p in self.samples[i].positions})
        ids = torch.tensor(rows, device=input_device(self.model))
        try:
            keep = torch.tensor(logit_positions, device=ids.device)
            logits = self.model(ids, use_cache=False, logits_to_keep=keep).logits
        except Exception as error:
            if len(unit) == 1 or not is_out_of_memory(error):
                raise
            logits = None
        if logits is None:  # the error, whose traceback held tensors, is gone by now
            half = len(unit) // 2
            return self._score_batch(unit[:half]) | self._score_batch(unit[half:])
        self.tokens_read += ids.numel()
        if logits.shape[1] == stop:  # an architecture that makes them all
            logits = logits[:, logit_positions]
        index = {position: at for at, position in enumerate(logit_positions)}
        scores = {}
        for i, row in zip(unit, logits, strict=True):
            positions = self.samples[i].positions
            sample_logits = row[torch.tensor([index[p - 1] for p in positions], device=row.device)]
            scores[i] = _aggregate(
                self.samples[i], *_token_nll(self.samples[i], positions, sample_logits)
            )
        return scores

    @torch.no_grad()
    def _score_single(self, sample: Sample, reader: PrefixReader) -> Score:
        """Score one sample: its prompt in chunks, then the tokens from its first answer on."""
        first, stop = sample.answers[0][0], sample.answers[-1][1] - 1
        while True:
            before = reader.tokens_read
            try:
                cache = reader(list(sample.ids[:first]), length=stop)
                nll_and_hits = self._score_after_cache(sample, cache, first, stop)
                break
            except Exception as error:
                if not (is_out_of_memory(error) and reader.halve_chunk()):
                    raise
                self._chunk = reader.chunk
            finally:
                self.tokens_read += reader.tokens_read - before
        return _aggregate(sample, *nll_and_hits)

    def _score_after_cache(
        self, sample: Sample, cache: Any, first: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_token_nll` of all scored tokens, behind a cache of the tokens before."""
        device, handle = input_device(self.model), current(self.model)
        # The cache holds all tokens before `first` - 1. The logits of the token at `first` - 1
        # predict the one at `first`. The sample's last token predicts nothing, so `stop` leaves it
        # out.
        nll, right = [], []
        if handle is not None:
            handle.fix_length(stop)
        try:
            for start in range(first - 1, stop, _TAIL_CHUNK):
                end = min(start + _TAIL_CHUNK, stop)
                tokens = torch.tensor([sample.ids[start:end]], device=device)
                logits = self.model(
                    tokens, **cache_arguments(self.model, cache), use_cache=True
                ).logits[0]
                positions = [p for p in sample.positions if start < p <= end]
                scored = _token_nll(sample, positions, logits[[p - 1 - start for p in positions]])
                nll.append(scored[0])
                right.append(scored[1])
                self.tokens_read += end - start
        finally:
            if handle is not None:
                handle.fix_length(None)
        return torch.cat(nll), torch.cat(right)


def _token_nll(
    sample: Sample, positions: list[int], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nats of the tokens at some positions, and whether each is the likeliest one."""
    targets = torch.tensor([sample.ids[p] for p in positions], device=logits.device).long()
    logits = logits.float()  # those that predict the N positions, [N, vocabulary]
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return nll.double().cpu(), (logits.argmax(-1) == targets).cpu()


def _aggregate(sample: Sample, nll: torch.Tensor, right: torch.Tensor) -> Score:
    """Return a sample's score from `_token_nll` of all its scored tokens."""
    hits, at = [], 0
    for start, stop in sample.answers:
        hits.append(bool(right[at : at + stop - start].all()))
        at += stop - start
    return Score(nll.mean().item(), () if sample.prose else tuple(hits))


@torch.no_grad()
def score_target(
    cache: Any, last_token: int, target: list[int], reader: PrefixReader
) -> dict[str, Any]:
    """Score a target after a prompt; leave the cache as it was.

    Args:
        cache: The reader's, of all but the prompt's last token.
        last_token: The prompt's last token.
        target: The tokens to score.
        reader: The reader that read the prompt.

    Returns:
        The log-likelihood in nats, and whether greedy decoding would write the target.
    """
    fed = torch.tensor([[last_token, *target[:-1]]], device=input_device(reader.model))
    scratch = reader.borrow(cache, fed.shape[1])
    logits = (
        reader.model(fed, **cache_arguments(reader.model, scratch), use_cache=True)
        .logits[0]
        .float()
    )
    reader.give_back(cache, scratch, fed.shape[1])
    return _likelihood(logits, target)


@torch.no_grad()
def score_together(
    cache: Any, last_token: int, targets: list[list[int]], reader: PrefixReader
) -> list[dict[str, Any]]:
    """Score several targets after one prompt in one pass; leave the cache as it was.

    All are packed into one row, and the mask keeps them apart. A padded batch would need the
    prompt's cache once for each row: on a CPU, copying it takes longer than the passes one by one.

    Args:
        cache: See `score_target`.
        last_token: See `score_target`.
        targets: The tokens to score.
        reader: See `score_target`; its model's attention takes any mask.
    """
    at, read = input_device(reader.model), cache.get_seq_length()
    rows = [[last_token, *target[:-1]] for target in targets]
    ids = torch.tensor([[token for row in rows for token in row]], device=at)
    positions = torch.tensor([[read + i for row in rows for i in range(len(row))]], device=at)
    owner = torch.tensor([number for number, row in enumerate(rows) for _ in row], device=at)
    own = (owner[:, None] == owner[None]).tril()
    seen = torch.cat([own.new_ones(len(owner), read), own], dim=1)[None, None]
    # Additive, because eager attention adds it.
    dtype = reader.model.dtype
    mask = torch.zeros(seen.shape, dtype=dtype, device=at)
    mask.masked_fill_(~seen, torch.finfo(dtype).min)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
    logits = reader.model(ids, **cache_arguments(reader.model, cache), **arguments).logits[0]
    reader.give_back(cache, cache, ids.shape[1])
    parts = logits.split([len(row) for row in rows])
    return [_likelihood(part.float(), t) for part, t in zip(parts, targets, strict=True)]


@torch.no_grad()
def score_batch(
    model: Any, prompts: Sequence[list[int]], targets: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """Score a target after each of some short prompts; read a prompt that all share once.

    Rows are padded on the right, where a causal model does not look, and masked all the same:
    where the rotation follows a row's length, padding must not count.

    Args:
        model: A transformers causal language model.
        prompts: Ordered; at least one.
        targets: One after each.
    """
    at, cache, read = input_device(model), None, 0
    first, last = prompts[0], prompts[-1]
    alike = len(prompts) > 1 and first == last and len(first) > 1
    handle = current(model)
    if alike and not (handle and handle.method.is_length_dependent(handle.trained_length)):
        # All but the last token, which goes before every target.
        read = len(first) - 1
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        prompt = torch.tensor([first[:-1]], device=at)
        model(prompt, **cache_arguments(model, cache), use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(prompts))
    rows = [[*ids[read:], *target[:-1]] for ids, target in zip(prompts, targets, strict=True)]
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=at)
    seen = [[1] * (read + len(row)) + [0] * (longest - len(row)) for row in rows]
    mask = torch.tensor(seen, device=at)
    given = {**cache_arguments(model, cache), "use_cache": cache is not None}
    logits = model(padded, attention_mask=mask, **given).logits
    return [
        _likelihood(scores[len(row) - len(target) : len(row)].float(), target)
        for target, row, scores in zip(targets, rows, logits, strict=True)
    ]


def _likelihood(logits: torch.Tensor, target: list[int]) -> dict[str, Any]:
    """Return a target's log-likelihood from the logits before each token, `[T, V]`."""
    target_ids = torch.tensor(target, device=logits.device)
    log_likelihood = logits.log_softmax(-1).gather(-1, target_ids[:, None]).sum().item()
    return {
        "log_likelihood": log_likelihood,
        "greedy": bool((logits.argmax(-1) == target_ids).all()),
    }
