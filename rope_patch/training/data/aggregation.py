"""Questions over a whole text, made from it by rules and woven into long documents.

Olmo 3 (arXiv:2512.13961) trains on such aggregation: CWE counts the most common words of long
passages, REX collects what is spread over them; there a model writes both, here no model does.
An answer follows from the text above it in the same document and row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from rope_patch.training.data.documents import TokenizedDocument
from rope_patch.utils.errors import did_you_mean

_LETTERS = 5  # letters of the shortest word that is asked for
_CANDIDATES = 20  # words that are tried before a task is given up
_WORD = re.compile(r"[^\W\d_]+")
# Up to a full stop, question or exclamation mark that is followed by white space; or an empty line.
_SENTENCE = re.compile(
    r"\S.*?(?:(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)[.!?][\"'”’)]*(?=\s)|(?=\n\s*\n)|\Z)",
    re.DOTALL,
)
Question = tuple[str, str]  # a question and its answer


def common_words(text: str, random: Random, fits: Callable[[str, str], bool]) -> Question | None:
    """Ask for the most common words and their counts, as RULER's and Olmo 3's CWE do.

    The counts tell the last word asked for from the next one; words of equal counts have the order
    of the alphabet.
    """
    ranks = sorted(_count_words(text).items(), key=lambda item: (-item[1], item[0]))
    for number in range(random.randint(3, 10), 1, -1):
        if len(ranks) <= number or ranks[number - 1][1] == ranks[number][1]:
            continue
        question = (
            f"What are the {number} most common words of at least {_LETTERS} letters in the text "
            "above, and how often does each occur?"
        )
        answer = ", ".join(f"{word} ({count})" for word, count in ranks[:number])
        if fits(question, answer):
            return question, answer
    return None


def extraction(text: str, random: Random, fits: Callable[[str, str], bool]) -> Question | None:
    """Ask for all sentences with a word that occurs in two to six of them, far apart."""
    sentences = [" ".join(match[0].split()) for match in _SENTENCE.finditer(text)]
    places: dict[str, list[int]] = {}
    for number, sentence in enumerate(sentences):
        for word in sorted(_count_words(sentence)):
            places.setdefault(word, []).append(number)
    candidates = [
        word
        for word, numbers in places.items()
        if 2 <= len(numbers) <= 6 and 2 * (numbers[-1] - numbers[0]) >= len(sentences)
    ]
    for word in random.sample(candidates, min(_CANDIDATES, len(candidates))):
        question = (
            f'Which sentences of the text above have the word "{word}"? Write them out in order.'
        )
        answer = "\n".join(f"{i}. {sentences[n]}" for i, n in enumerate(places[word], start=1))
        if fits(question, answer):
            return question, answer
    return None


def records(text: str, random: Random, fits: Callable[[str, str], bool]) -> Question | None:
    """Ask for a record of several words: their counts, and what follows them first and last."""
    words = _words(text)
    places: dict[str, list[int]] = {}
    for number, word in enumerate(words[:-1]):
        if len(word) >= _LETTERS:
            places.setdefault(word, []).append(number)
    if words and words[-1] in places:  # nothing follows it
        del places[words[-1]]
    candidates = [word for word, numbers in places.items() if len(numbers) > 1]
    for number in range(min(random.randint(2, 6), len(candidates)), 0, -1):
        chosen = sorted(random.sample(candidates, number))
        question = (
            "How often does each of these words occur in the text above, and which word follows it "
            f"the first and the last time: {', '.join(chosen)}?"
        )
        answer = "\n".join(
            f"{word}: {len(at)} times, first {words[at[0] + 1]}, last {words[at[-1] + 1]}"
            for word, at in ((word, places[word]) for word in chosen)
        )
        if fits(question, answer):
            return question, answer
    return None


TASKS = {"common_words": common_words, "extraction": extraction, "records": records}


def check_aggregation(share: float, tasks: list[str]) -> None:
    """Check a recipe's `aggregation_share` and `aggregation_tasks`.

    Raises:
        ValueError: The share is out of bounds, or a task is unknown, named twice, or missing.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"aggregation_share must be 0 to 1, got {share}")
    known = ", ".join(TASKS)
    if share and not tasks:
        raise ValueError(f"aggregation_share needs aggregation_tasks: expected some of {known}")
    for task in tasks:
        if task not in TASKS:
            hint = did_you_mean(task, TASKS, 0.5)
            raise ValueError(f"aggregation_tasks takes {known}, got {task!r}{hint}")
        if tasks.count(task) > 1:
            raise ValueError(f"aggregation_tasks names {task!r} twice: say it once")


class RowWithQuestion(NamedTuple):
    """The next tokens of a document, with a question about them and its answer.

    Attributes:
        ids: Token ids of document, question and answer, `[S]` int64.
        labels: Labels of `ids`; a question and its answer are learnt as text is.
        used: How many of `ids` are the document's.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    used: int


class TaskWeaver:
    """Puts questions and their answers into a share of documents.

    Args:
        tokenizer: The model's tokenizer.
        tasks: Names among `TASKS`.
        share: Share of the documents that get questions, one in each row that they reach.
        seed: Seed of the choice of documents and of questions.
    """

    def __init__(self, tokenizer: Any, tasks: list[str], share: float, seed: str) -> None:
        self._tokenizer, self._tasks, self._share, self._seed = tokenizer, tasks, share, seed

    def weave(
        self, document: TokenizedDocument, offset: int, limit: int, place: str
    ) -> RowWithQuestion | None:
        """Return the next tokens of a document with a question about them.

        The question takes at most a quarter of them. It is at the end of a document that ends
        here, else the document goes on behind it.

        Args:
            document: The document.
            offset: Tokens of it that were used before.
            limit: Tokens to return at most; as many unless the document ends before.
            place: A name of the document, from which the choices follow.

        Returns:
            None if the document was not chosen, or no question fits.
        """
        if Random(f"{self._seed} {place}").random() >= self._share:
            return None
        random = Random(f"{self._seed} {place} {offset}")
        rest, labels = document.ids[offset:], document.labels[offset:]
        end = int(len(rest) > 0 and rest[-1].item() == self._tokenizer.eos_token_id)
        size = len(rest) - end
        room = min(limit - len(rest), size // 3)
        if room > 0 and (task := self._make_task(rest[:size], room, random)) is not None:
            return RowWithQuestion(
                torch.cat([rest[:size], task, rest[size:]]),
                torch.cat([labels[:size], task, labels[size:]]),
                len(rest),
            )
        room = min(limit, len(rest)) // 4
        head = min(limit, len(rest)) - room
        task = self._make_task(rest[:head], room, random)
        if task is None:
            return None
        used = min(limit - len(task), len(rest))
        return RowWithQuestion(
            torch.cat([rest[:head], task, rest[head:used]]),
            torch.cat([labels[:head], task, labels[head:used]]),
            used,
        )

    def _make_task(self, ids: torch.Tensor, room: int, random: Random) -> torch.Tensor | None:
        """Return the tokens of a question about others and of its answer; None if none fits."""
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        found: list[list[int]] = []

        def fits(question: str, answer: str) -> bool:
            woven = f"\n\nQuestion: {question}\nAnswer: {answer}\n\n"
            if len(woven) > 16 * room:  # far too long: spare the tokenizer
                return False
            tokens = self._tokenizer(woven, add_special_tokens=False, verbose=False).input_ids
            found.append(tokens)
            return len(tokens) <= room

        for name in random.sample(self._tasks, len(self._tasks)):
            if TASKS[name](text, random, fits) is not None:
                return torch.tensor(found[-1], dtype=torch.int64)
        return None


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _count_words(text: str) -> Counter[str]:
    return Counter(word for word in _words(text) if len(word) >= _LETTERS)
