"""Factors and lengths as people write them: `4`, `4x`, `32768`, `32,768`, `32k`, `1m`.

One rule holds for all commands, options, recipe keys and Python arguments:

- A unit decides. `x` (or `×`) is times the trained length, `k` 1,024 tokens, `m` 1,048,576 tokens.
- Without a unit the place decides: a `factor` counts trained lengths, a `length` tokens.
- A place that takes both (`to`) reads a number without a unit as a factor up to `MOST_TIMES`, and
  as tokens beyond.
"""

from __future__ import annotations

import math
import re
from typing import Any

from rope_patch.utils.errors import Refused, one_line

# Most published extensions go to 32 times the trained length in one step (YaRN, Llama 3.2),
# LongRoPE to 64 times (256k from 4k). Beyond are those in several steps (LongRoPE's 2048k) or of
# models that were extended before (UltraLong); else a number is a slip.
MOST_TIMES = 64

_TOKENS = {"k": 1024, "m": 1024**2}
_WRITTEN = re.compile(
    r"(?P<before>[x×]?)"
    r"(?P<number>[+-]?(\d{1,3}(,\d{3})+|\d[\d_]*|(?=\.\d))(\.\d+)?(e[+-]?\d+)?)"
    r"\s?(?P<after>[x×km]?)"
)
_KINDS = {
    "factor": "a factor such as 4 or 4x",
    "tokens": "tokens such as 32768 or 32k",
    "either": "a factor such as 4x, or tokens such as 32768 or 32k",
}


def parse_tokens(name: str, value: Any) -> Any:
    """Return the tokens that a text means; what is no text is returned as it is.

    Args:
        name: The argument's name, for the error.
        value: A text such as `32768`, `32,768`, `32k` or `1m`; or what is checked later.

    Raises:
        ValueError: The text is no whole number of tokens.
    """
    return _read(name, value, "tokens")[1] if isinstance(value, str) else value


def parse_factor(name: str, value: Any) -> Any:
    """Return the factor that a text means; what is no text is returned as it is.

    Args:
        name: The argument's name, for the error.
        value: A text such as `4` or `4x`; or what is checked later.

    Raises:
        ValueError: The text is no factor.
    """
    return _read(name, value, "factor")[0] if isinstance(value, str) else value


def parse_target(name: str, value: Any) -> tuple[float | None, int | None]:
    """Return a target as a factor and None, or as None and tokens.

    Args:
        name: The argument's name, for the error.
        value: A number, or a text such as `4`, `4x`, `32768` or `32k`.

    Raises:
        ValueError: It is neither.
    """
    return _read(name, str(value), "either")


def split_target(factor: Any, length: Any) -> tuple[Any, Any]:
    """Return the factor and the length that two arguments mean; what is no text stays as it is.

    Args:
        factor: A factor, or a text of either kind, whose unit decides; or None.
        length: Tokens, or a text of either kind, whose unit decides; or None.

    Raises:
        ValueError: A text is neither kind, or both arguments give the same.
    """
    first = _read("factor", factor, "either", "x") if isinstance(factor, str) else (factor, None)
    second = _read("length", length, "either", "t") if isinstance(length, str) else (None, length)
    pairs = list(zip(first, second, strict=True))
    if any(None not in pair for pair in pairs):
        raise Refused(
            f"expected exactly one of factor and length, got factor={factor} and length={length}"
        )
    factor, length = (next((v for v in pair if v is not None), None) for pair in pairs)
    return factor, length


def _read(name: str, text: str, kind: str, bare: str = "") -> tuple[float | None, int | None]:
    """Return a text's factor or else its tokens; `bare` is the unit of a number without one."""
    match = _WRITTEN.fullmatch(text.strip().lower())
    number = float(match["number"].replace(",", "").replace("_", "")) if match else math.nan
    units = "" if match is None else match["before"] + match["after"]
    unit = units or {"factor": "x", "tokens": "t"}.get(kind, bare)
    if not unit:
        unit = "x" if number <= MOST_TIMES else "t"
    is_factor = unit in ("x", "×")
    tokens = number * _TOKENS.get(unit, 1)
    if (
        len(units) > 1
        or not math.isfinite(number)
        or kind == ("tokens" if is_factor else "factor")
        or not (is_factor or tokens.is_integer())
    ):
        raise Refused(f"{name} must be {_KINDS[kind]}, got {one_line(repr(text), 60)}")
    return (number, None) if is_factor else (None, int(tokens))
