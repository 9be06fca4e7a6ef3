"""Write docs/architectures.md from the stored measurements.

`python tests/architectures/architectures_page.py` measures every architecture of the installed
transformers in a few minutes and writes the page; columns of other versions stay.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import transformers

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
ENCODINGS = HERE / "measured_encodings.json"
PAGE = HERE.parents[1] / "docs" / "architectures.md"

_HEAD = """# Architectures

Every architecture of transformers that reads or writes text was patched and undone, as a tiny
random model: those that generate text and rotate in the first table, encoders and all other
encodings of positions [below](#encoders-and-other-encodings).
`python tests/architectures/architectures_page.py` writes this page; `test_architectures_page.py`
beside it checks it.

"Patched: yes" means:

- with `linear`, every frequency became the model's own divided by the factor;
- with `yarn`, every frequency became what a second implementation of the formula gives;
- the logits changed, and transformers' code and our kernels gave the same ones;
- undoing the patch restored the logits, bit for bit.

"Follows the length: yes" means that with `dynamic-yarn` short texts kept their logits, and those
of long texts changed; and that, when a text with a cache outgrew its trained length, everything
that was cached rotated had the new rotation, and nothing else changed. "no" means that the patch
was refused with an error that says why, and that the model stayed as it was.

"Positions mapped: yes" means that with `rerope` short texts kept their logits, bit for bit, those
of long texts changed, and steps with a cache gave the logits of one pass.
"""

_ENCODINGS_HEAD = """## Encoders and other encodings

"Extended: yes" means that the model, extended to twice its length,

- gave finite logits for a text of twice the length;
- with a learned table, gave the logits of a model that was built with the longer table;
- with a sinusoidal table, had its own rows at every other position;
- with ALiBi or T5's buckets, gave other logits than before;
- gave the same logits as before, bit for bit, once the patch was undone, with the same config.

Where an architecture has an encoder and a decoder, the parts that were extended are named. "none"
means that nothing but recurrence or the mask tells order, so that any length can be read.
[Encodings that do not rotate](other-encodings.md) has the methods.
"""


def render(measured: dict[str, dict[str, Any]], encodings: dict[str, dict[str, Any]]) -> str:
    """Return the page's text.

    Args:
        measured: Rows of architectures that generate text, by version of transformers.
        encodings: Rows of all encodings, by version of transformers.
    """
    versions = sorted(measured, key=_version_key, reverse=True)
    newest = measured[versions[0]]
    others = encodings[max(encodings, key=_version_key)]
    rotating = [
        name
        for name, row in newest.items()
        if not _unrotated(row) and (name not in others or _rotates(others[name]))
    ]
    patched = {v: sum(_yes(row) for row in measured[v].values()) for v in versions}
    lines = [_HEAD]
    counts = ", ".join(f"{patched[v]} with transformers {v}" for v in versions)
    lines += [f"Patched: {counts}.", ""]
    heads = ["architecture", "rotation"]
    for version in versions:
        heads += [f"patched, {version}", "follows the length"]
        if version == versions[0]:
            heads.append("positions mapped")
    lines += [_line(heads), _line([":--"] * 2 + [":-:"] * (len(heads) - 2))]
    for name in rotating:
        cells = [f"`{name}`", newest[name]["rotation"]]
        for version in versions:
            row = measured[version].get(name)
            cells += ["–", "–"] if row is None else [_short(row["static"]), _short(row["dynamic"])]
            if version == versions[0]:
                cells.append(_short(newest[name]["mapped"]))
        lines.append(_line(cells))
    lines += ["", "## Why not", ""]
    lines += _reasons(newest, rotating, "static", "Refused")
    lines += _reasons(newest, rotating, "dynamic", "Refused for methods that follow the length")
    lines += _reasons(newest, rotating, "mapped", "Refused for position maps")
    lines += _encoding_lines({n: row for n, row in others.items() if n not in rotating})
    return "\n".join(lines)


def _encoding_lines(rows: dict[str, Any]) -> list[str]:
    extended = sum(row["result"] == "extended" for row in rows.values())
    lines = [_ENCODINGS_HEAD, f"Extended: {extended} of {len(rows)}.", ""]
    heads = ["architecture", "encoding", "parts", "method", "extended"]
    lines += [_line(heads), _line([":--"] * 4 + [":-:"])]
    for name, row in rows.items():
        is_none = row["encoding"] == "none"
        result = {"extended": "yes"}.get(row["result"], "" if is_none else "no")
        result = "–" if row["result"].startswith("not built") else result
        cells = [f"`{name}`", row["encoding"], row["parts"], row["method"], result]
        lines.append(_line(cells))
    without = [name for name, row in rows.items() if row["encoding"] != "none"]
    reasons = {n: {"result": _reason(rows[n]["result"])} for n in without}
    return [*lines, "", *_reasons(reasons, without, "result", "Not extended")]


def _reason(result: str) -> str:
    """Return a result without the class and the module that it names; "" if it is extended."""
    if result == "extended":
        return ""
    return re.sub(r"^refused: \w+ is not extended: | \([\w.]+\)$", "", result)


def _rotates(row: dict[str, Any]) -> bool:
    return row["encoding"] == "rotary" or "no rotary embedding" in row["result"]


def _reasons(rows: dict[str, Any], names: list[str], column: str, title: str) -> list[str]:
    """Group the architectures by error message, without class names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        status = rows[name][column]
        if status and status != "patched":
            groups.setdefault(_general(status), []).append(name)
    lines = [f"**{title}:**", ""]
    for reason, members in sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        lines.append(f"- {', '.join(f'`{m}`' for m in members)}: {reason}")
    return [*lines, ""]


def _general(status: str) -> str:
    reason = status.removeprefix("refused: ")
    words = [
        "the model" if re.match(r"\w+(CausalLM|Config|Attention|Generation|Embedding)\b", w) else w
        for w in reason.split()
    ]
    return " ".join(words).split(": use a method")[0].replace("|", "\\|")


def _short(status: str) -> str:
    return {"patched": "yes", "": ""}.get(status, "no" if status.startswith("refused") else "–")


def _yes(row: dict[str, Any]) -> bool:
    return row["static"] == "patched"


def _unrotated(row: dict[str, Any]) -> bool:
    return row["static"] == "no rotary embedding" or row["static"].startswith("no such")


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _write() -> None:
    from architecture_measurements import measure
    from architectures.encoding_measurements import measure_encoding
    from architectures.text_models import text_model_types
    from architectures.tiny_architectures import model_types
    from tqdm import tqdm

    measured = json.loads(MEASURED.read_text()) if MEASURED.is_file() else {}
    rows = {name: measure(name).to_dict() for name in tqdm(model_types())}
    for row in rows.values():
        del row["model_type"]
    measured[transformers.__version__] = rows
    MEASURED.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
    encodings = json.loads(ENCODINGS.read_text()) if ENCODINGS.is_file() else {}
    encodings[transformers.__version__] = {
        name: measure_encoding(name).to_dict()
        for name in tqdm(text_model_types())
        if name not in rows or not _yes(rows[name])
    }
    ENCODINGS.write_text(json.dumps(encodings, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(measured, encodings))


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    transformers.logging.set_verbosity_error()
    _write()
