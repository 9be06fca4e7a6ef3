"""Compressibility of documents: a filter of repetition and of noise.

Source: Olmo 3, arXiv:2512.13961, leaves out the 20% of long documents that gzip compresses most,
and the 20% that it compresses least.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

from rope_patch.training.data.documents import TokenizedDocument


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
