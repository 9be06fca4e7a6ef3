"""Tokenise documents of a recipe, and compute how far each can be compressed.

In comes a reference to a document; out come its tokens, labels and text. `compression_ratio` is the
measure of a recipe's filter against repetitive and noisy documents. Source: Olmo 3,
arXiv:2512.13961, leaves out the 20% of long documents that gzip compresses most, and the 20% that
it compresses least.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch

from rope_patch.training.data.readers import DocumentRef, columns_to_read

IGNORED = -100  # the label of a token that transformers' losses leave out


class TokenizedDocument(NamedTuple):
    """A document's location, tokens and labels, `[S]` int64 each, and its text, if read."""

    location: str
    ids: torch.Tensor
    labels: torch.Tensor
    text: str | None = None


def tokenize_document(document: DocumentRef, tokenizer: Any, text_column: str) -> TokenizedDocument:
    """Return a document's tokens, ending in the tokenizer's end token.

    The `input_ids` and `labels` of a record are used as they are; an end token appended to labels
    gets no loss.

    Raises:
        ValueError: The record is damaged or unsuitable; names its location.
    """
    loaded = document.load()
    labels: torch.Tensor | None = None
    text: str | None = None
    if isinstance(loaded, dict) and loaded.get("input_ids") is not None:
        ids = _to_int64(loaded["input_ids"], "input_ids", document.location)
        _require_in_vocabulary(ids, len(tokenizer), document.location)
        if loaded.get("labels") is not None:
            labels = _to_int64(loaded["labels"], "labels", document.location)
            _require_labels(labels, ids, len(tokenizer), document.location)
    else:
        text = (
            loaded
            if isinstance(loaded, str)
            else _record_text(loaded, text_column, document.location)
        )
        _require_characters(text, document.location)
        ids = torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.int64)
    end = tokenizer.eos_token_id
    if end is not None and len(ids) and ids[-1] != end:
        ids = torch.cat([ids, ids.new_tensor([end])])
        labels = None if labels is None else torch.cat([labels, ids.new_tensor([IGNORED])])
    return TokenizedDocument(document.location, ids, ids if labels is None else labels, text)


def _require_characters(text: str, location: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{location}: expected text, got half a character (\\u{ord(text[error.start]):04x}) at "
            f"character {error.start + 1:,}, which no tokenizer takes: repair or remove the record"
        ) from None


def _record_text(record: dict[str, Any], column: str, location: str) -> str:
    text = record[columns_to_read([n for n in record if n != "input_ids"], column, location)[0]]
    if not isinstance(text, str):
        raise ValueError(f"{location}: expected text in {column!r}, got {type(text).__name__}")
    return text


def _to_int64(values: Any, column: str, location: str) -> torch.Tensor:
    try:
        tensor = torch.tensor(values)
        if tensor.numel() == 0 or (tensor.dim() == 1 and tensor.dtype == torch.int64):
            return tensor.long().flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"{location}: expected a list of whole numbers in {column!r}")


def _require_in_vocabulary(ids: torch.Tensor, size: int, location: str) -> None:
    invalid_ids = ids[(ids < 0) | (ids >= size)]
    if len(invalid_ids):
        raise ValueError(
            f"{location}: expected input_ids of 0 to {size - 1}, got {invalid_ids[0].item()}: they "
            "come from another tokenizer; tokenise with the model's own"
        )


def _require_labels(labels: torch.Tensor, ids: torch.Tensor, size: int, location: str) -> None:
    if len(labels) != len(ids):
        raise ValueError(
            f"{location}: expected a label for each of {len(ids)} input_ids, got {len(labels)}; "
            f"{IGNORED} is for tokens without loss"
        )
    _require_in_vocabulary(labels[labels != IGNORED], size, f"{location}, labels")


def compression_ratio(text: str) -> float:
    """Return the size of a text compressed by zlib (level 6) / its size in UTF-8; inf if empty."""
    raw = text.encode("utf-8", "surrogatepass")
    return len(zlib.compress(raw, 6)) / len(raw) if raw else math.inf


def document_text(document: TokenizedDocument, tokenizer: Any) -> str:
    """Return a document's text, decoded where its record has tokens alone.

    Raises:
        ValueError: The tokenizer cannot decode.
    """
    if document.text is not None:
        return document.text
    if not hasattr(tokenizer, "decode"):
        raise ValueError(
            f"{document.location}: compression_ratio needs a document's text, and this record has "
            "input_ids that the tokenizer cannot decode: give the text, or leave the key out"
        )
    return tokenizer.decode(document.ids.tolist(), skip_special_tokens=True)


def check_compression_ratio(bounds: list[float] | None) -> None:
    """Check a recipe's `compression_ratio`.

    Raises:
        ValueError: It is not two rising numbers from 0 on.
    """
    if bounds is None:
        return
    if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1]:
        raise ValueError(
            "compression_ratio must be the lowest and the highest size compressed / size, such as "
            f"[0.3, 0.6], got {bounds}"
        )
    if bounds[0] >= 1:
        raise ValueError(
            f"compression_ratio {bounds} leaves out all text: it compresses to less than its size, "
            "by about [0.3, 0.6]"
        )


def compressor() -> str:
    """Return which implementation compresses: their sizes differ a little."""
    return "zlib-ng" if "zlib-ng" in zlib.ZLIB_RUNTIME_VERSION else "zlib"
