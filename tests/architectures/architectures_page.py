"""Write docs/architectures.md from the stored measurements.

`python tests/architectures/architectures_page.py` measures every architecture of the installed
transformers in a few minutes and writes the page; columns of other versions stay. The tests call
the same functions: `measure`, `measure_maps` and `measure_encoding`. `maps` as an argument measures
the position maps alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:  # where it is not pytest that runs this file
    sys.path[:0] = [str(HERE), str(HERE.parent)]

import mapped_measurements as map_measurements  # noqa: E402

MEASURED = HERE / "measured.json"
MAPS = HERE / "measured_maps.json"
ENCODINGS = HERE / "measured_encodings.json"
PAGE = HERE.parents[1] / "docs" / "architectures.md"

_HEAD = """# Architectures

Every architecture of transformers that reads or writes text was patched and undone, as a tiny
random model: those that generate text and rotate in the first table, encoders and all other
encodings of positions [below](#encoders-and-other-encodings).
`python tests/architectures/architectures_page.py` writes this page; `test_architectures_page.py`
beside it checks it.

"Patched: yes" means, in eager attention:

- with `linear`, every frequency became the model's own divided by the factor;
- with `yarn`, every frequency became what a second implementation of the formula gives;
- the logits changed, and transformers' code and our kernels gave the same ones;
- undoing the patch restored the logits, bit for bit.

"Follows the length: yes" means, in eager attention, that with `dynamic-yarn` short texts kept their
logits, and those of long texts changed; and that, when a text with a cache outgrew its trained
length, everything that was cached rotated had the new rotation, and nothing else changed. "no"
means that the patch was refused with an error that says why, and that the model stayed as it was.

"Positions mapped" names the attentions under which an architecture was mapped: the one that it runs
by default, and eager. Each ran each of MAPS, two layers of each type, and under each of them

- short texts kept their logits, bit for bit, where the map replaces no scaling of the config;
- in a long text, queries within the trained length kept their logits, and others changed;
- chunks and steps with a cache gave the logits of one pass;
- a padded row beside a longer one gave the logits of the row alone;
- where a mask lets the first tokens see each other, too, queries within the trained length kept
  their logits;
- undoing the map restored the logits and frequencies, bit for bit;

and SDPA and eager attention gave the same logits. "no" means that each map was refused with the
same error under each, and that the model stayed as it was.
[Some claims](#position-maps) are not asked, because the plain model does not do it either.
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


def render(
    measured: dict[str, dict[str, Any]],
    maps: dict[str, dict[str, Any]],
    encodings: dict[str, dict[str, Any]],
) -> str:
    """Return the page's text.

    Args:
        measured: Rows of architectures that generate text, by version of transformers.
        maps: Rows of position maps, by version of transformers.
        encodings: Rows of all encodings, by version of transformers.
    """
    versions = sorted(measured, key=version_key, reverse=True)
    newest = measured[versions[0]]
    mapped = {name: _mapped(row) for name, row in maps[versions[0]].items()}
    others = encodings[max(encodings, key=version_key)]
    # Architectures that the newest release has no more are in the counts, so they have rows, too.
    latest = {
        name: row for version in reversed(versions) for name, row in measured[version].items()
    }
    rotating = [
        name
        for name, row in sorted(latest.items())
        if not _unrotated(row) and (name not in others or _rotates(others[name]))
    ]
    patched = {v: sum(_yes(row) for row in measured[v].values()) for v in versions}
    lines = [_HEAD.replace("MAPS", _listed(map_measurements.MAPS))]
    counts = ", ".join(f"{patched[v]} with transformers {v}" for v in versions)
    in_all = sum(mapped.get(name, ("no", ""))[0] not in ("no", "") for name in rotating)
    lines += [f"Patched: {counts}. Positions mapped: {in_all} with transformers {versions[0]}.", ""]
    heads = ["architecture", "rotation"]
    for version in versions:
        heads += [f"patched, {version}", "follows the length"]
        if version == versions[0]:
            heads.append("positions mapped")
    lines += [_line(heads), _line([":--"] * 2 + [":-:"] * (len(heads) - 2))]
    for name in rotating:
        cells = [f"`{name}`", latest[name]["rotation"]]
        for version in versions:
            row = measured[version].get(name)
            cells += ["–", "–"] if row is None else [_short(row["static"]), _short(row["dynamic"])]
            if version == versions[0]:
                cells.append(mapped.get(name, ("", ""))[0])
        lines.append(_line(cells))
    lines += ["", "## Why not", ""]
    in_newest = [name for name in rotating if name in newest]
    lines += _reasons(newest, in_newest, "static", "Refused")
    lines += _reasons(newest, in_newest, "dynamic", "Refused for methods that follow the length")
    refused = {name: {"mapped": why} for name, (_, why) in mapped.items()}
    lines += _reasons(refused, list(refused), "mapped", "Refused for position maps")
    lines += _map_lines({name: cell for name, (cell, _) in mapped.items()})
    lines += _encoding_lines({n: row for n, row in others.items() if n not in rotating})
    return "\n".join(lines)


def _mapped(row: dict[str, str]) -> tuple[str, str]:
    """Return the attentions that an architecture was mapped under, or "no", and why."""
    statuses = {status for method, status in row.items() if method != "attentions"}
    if statuses == {"patched"}:
        return row["attentions"], "patched"
    return "no", "; ".join(sorted(statuses - {"patched"}))


def _map_lines(cells: dict[str, str]) -> list[str]:
    """Return what was mapped beside the default configs, and which claims are not asked."""
    lines = ["## Position maps", ""]
    lines += ["With other fields of the config than the default ones:", ""]
    lines += [_line(["architecture", "fields", "positions mapped"]), _line([":--"] * 2 + [":-:"])]
    for name, fields in map_measurements.FLAGS.items():
        written = ", ".join(f"`{field}={value!r}`" for field, value in fields.items())
        lines.append(_line([f"`{map_measurements.model_type_of(name)}`", written, cells[name]]))
    lines += [
        "",
        f"With a map, {_listed(sorted(map_measurements.PADDING_REFUSED))} refuses padding ahead of "
        "tokens,",
        "because its indexer takes a token's position for its slot.",
        "",
        "What transformers' own models do not do, mapped ones are not asked:",
        "",
    ]
    for claim, names in (
        ("chunks with a cache give other logits than one pass", map_measurements.NOT_STEPWISE),
        ("a padded row gives other logits than the row alone", map_measurements.NOT_PADDED),
        ("SDPA gives other logits than eager attention", map_measurements.NOT_ALIKE),
        (
            "a query sees later tokens, which are mapped, so it changes within the trained length",
            map_measurements.BIDIRECTIONAL,
        ),
    ):
        lines.append(f"- {_listed(sorted(names))}: {claim}")
    return [*lines, ""]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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
            groups.setdefault(general(status), []).append(name)
    lines = [f"**{title}:**", ""]
    for reason, members in sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        lines.append(f"- {_listed(members)}: {reason}")
    return [*lines, ""]


def general(status: str) -> str:
    """Return a refusal without the names of the architecture's classes."""
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


def version_key(version: str) -> tuple[int, ...]:
    """Return what orders versions."""
    return tuple(int(part) for part in version.split("."))


def _write() -> None:
    from architecture_measurements import measure
    from architectures.encoding_measurements import measure_encoding
    from architectures.text_models import text_model_types
    from architectures.tiny_architectures import model_types
    from tqdm import tqdm

    if sys.argv[1:] != ["maps"]:
        rows = {name: measure(name).to_dict() for name in tqdm(model_types())}
        for row in rows.values():
            del row["model_type"]
        _stored(MEASURED, rows)
        _stored(
            ENCODINGS,
            {
                name: measure_encoding(name).to_dict()
                for name in tqdm(text_model_types())
                if name not in rows or not _yes(rows[name])
            },
        )
    measured, encodings = json.loads(MEASURED.read_text()), json.loads(ENCODINGS.read_text())
    names = map_measurements.mapped_names(measured[transformers.__version__])
    maps = _stored(MAPS, {name: map_measurements.measure_maps(name) for name in tqdm(names)})
    PAGE.write_text(render(measured, maps, encodings))


def _stored(file: Path, rows: dict[str, Any]) -> dict[str, Any]:
    """Write the rows of the installed transformers, and return those of all versions."""
    stored: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    stored[transformers.__version__] = rows
    file.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return stored


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    _write()
