"""Exact and near duplicates among documents, found while they are read one by one.

Two documents are exact duplicates if their normalised texts are equal: in Unicode's NFKC, without
case, with single spaces. They are near duplicates if their sets of five words in a row overlap by a
Jaccard similarity of at least 0.8, estimated by MinHash (A. Broder, "On the resemblance and
containment of documents", 1997), with the library `datasketch`.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

THRESHOLD = 0.8  # Jaccard similarity of near duplicates
SHINGLE_WORDS = 5
_PERMUTATIONS = 128  # the estimate's standard deviation is 0.035 at the threshold
_WEIGHTS = (0.1, 0.9)  # of false positives, which the estimate sorts out, and of false negatives
_BATCH_SHINGLES = 8192  # hashed at once: 8 MiB
# Scripts that have no spaces between words: each letter is a word. CJK, kana, Thai, Lao, Khmer.
_UNSPACED = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u3040-\u30ff\u0e00-\u0eff\u1780-\u17ff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Duplicate(NamedTuple):
    """A document that was there before.

    Attributes:
        location: Of the document.
        original: Location of the earlier one, which is no duplicate itself.
        similarity: Their Jaccard similarity: 1 if exact, else estimated.
        is_exact: Whether their normalised texts are equal.
    """

    location: str
    original: str
    similarity: float
    is_exact: bool


class DuplicateFinder:
    """Remembers documents, and says of later ones whether they are duplicates.

    It keeps some 4 KB for each document that is no duplicate.

    Raises:
        ValueError: The package datasketch is missing.
    """

    def __init__(self) -> None:
        datasketch = import_datasketch()
        self._empty = datasketch.MinHash(num_perm=_PERMUTATIONS)
        self._index = datasketch.MinHashLSH(
            threshold=THRESHOLD, num_perm=_PERMUTATIONS, weights=_WEIGHTS
        )
        self._locations: dict[bytes, str] = {}  # by the digest of the normalised text
        self._originals: list[tuple[str, Any]] = []

    def check(self, text: str, location: str) -> Duplicate | None:
        """Return the duplicate that a document is, or None, and remember it then.

        Args:
            text: The document's text.
            location: Where it is.
        """
        normalised = normalise(text)
        digest = hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=16)
        original = self._locations.get(digest.digest())
        if original is not None:
            return Duplicate(location, original, 1.0, is_exact=True)
        signature, duplicate = self._signature(normalised), None
        if signature is not None:
            duplicate = self._nearest(signature, location)
        if duplicate is None:
            self._locations[digest.digest()] = location
            if signature is not None:
                self._index.insert(len(self._originals), signature, check_duplication=False)
                self._originals.append((location, signature))
        return duplicate

    def _nearest(self, signature: Any, location: str) -> Duplicate | None:
        """Return the near duplicate with the most similar of the earlier documents."""
        similarity, original = 0.0, ""
        for key in sorted(self._index.query(signature)):
            candidate, other = self._originals[key]
            estimate = signature.jaccard(other)
            if estimate > similarity:
                similarity, original = estimate, candidate
        if similarity < THRESHOLD:
            return None
        return Duplicate(location, original, similarity, is_exact=False)

    def _signature(self, normalised: str) -> Any:
        """Return a text's MinHash, or None if it has no words."""
        signature, found = self._empty.copy(), shingles(normalised)
        is_empty = True
        while batch := set(islice(found, _BATCH_SHINGLES)):
            signature.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in batch])
            is_empty = False
        return None if is_empty else signature


def normalise(text: str) -> str:
    """Return a text in NFKC, without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingles(normalised: str) -> Iterator[str]:
    """Yield each five words in a row of a normalised text, or all words of a shorter one."""
    words = _WORD.findall(normalised)
    if words:
        for first in range(max(1, len(words) - SHINGLE_WORDS + 1)):
            yield " ".join(words[first : first + SHINGLE_WORDS])


def import_datasketch() -> Any:
    """Return the module datasketch.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return import_module("datasketch")
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which the search for duplicates needs: pip install "
            "'rope-patch[train]'"
        ) from error
