"""The report: a verdict in words, one page that needs nothing else, Markdown, JSON and figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rope_patch.eval import figures, heatmap, tables
from rope_patch.eval.files import write

_TASKS = {
    "niah_single": "RULER's single needle: one sentence with a 7-digit number is hidden in a "
    "novel's text. Depth is where, in percent of the text. Cells show right answers of all tries, "
    "scored by greedy generation; p is the geometric mean probability per token of the right "
    "answer after the prompt.",
    "niah_single_likelihood": "The samples of niah_single, at one forward pass each: right is "
    "where greedy decoding would begin with the answer; p is its probability per token.",
}
_FEW = "With fewer than 10 tries a cell, this proves that it can happen, not how often it does."
_STRETCH = (
    "How many times slower each rotated pair turns, by the tokens that one turn took in training. "
    "Pairs with a wavelength beyond the trained length never completed a turn there."
)
_LIMITS = (
    "Perplexity is of a well-known novel that every model has read: fine for comparing methods on "
    "one model, no claim about unseen text or between models.",
    "A flat curve does not prove that far context is used; only retrieval does.",
    "One text and one seed: differences of a percent or so may be chance.",
)
_CONTROL = (
    "The control is the plain model on the same tokens, given only the last few thousand before "
    "them: what cutting the text gets you. A patch that does no better gains nothing there."
)
_FOLLOWING = (
    "{names}: the rotation follows the length, so the text's first {trained:,} tokens are read by "
    "themselves, as a text that ends there, and the rest in one pass as the whole length asks for; "
    "the picture of stretches shows it at the longest length."
)


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Writes `report.html`, `report.md`, `report.json` and `figures/*.png`.

    Everything is rendered before anything is written, so a failure leaves an earlier report as it
    was, and each file is replaced at once.

    Args:
        results: What the evaluation measured.
        folder: Where to; made if missing.

    Returns:
        The path of `report.html`: one file that needs no other.
    """
    folder = Path(folder)
    pictures = figures.draw(results)
    page = _content(results) | {"pictures": pictures}
    files = {f"figures/{name}.png": picture.png for name, picture in pictures.items()}
    files |= {f"figures/{name}.png": png for name, png in heatmap.draw(results).items()}
    files["report.json"] = to_json(results, indent=2).encode()
    files["report.md"] = render("report.md.jinja", page).encode()
    files["report.html"] = render("report.html", page).encode()
    for name, content in files.items():
        write(folder / name, content)
    for pattern in ("perplexity.png", "stretch.png", "retrieval-*.png"):
        for earlier in (folder / "figures").glob(pattern):
            if f"figures/{earlier.name}" not in files:
                earlier.unlink()
    return folder / "report.html"


def verdict(results: dict[str, Any]) -> list[str]:
    """What the results say, in sentences; the first one is the headline."""
    found = _perplexity_verdict(results)
    needles = [s for t in tables.retrievals(results)[:1] for s in _retrieval_verdict(results, t)]
    sentences = [*found[:1], *needles[:1], *found[1:], *needles[1:]]
    return sentences or ["Nothing was measured."]


def _perplexity_verdict(results: dict[str, Any]) -> list[str]:
    drawn, name, end = tables.curves(results), tables.names(results), tables.headline_end(results)
    trained = f"{results['run']['trained_length']:,}"
    if not drawn:
        return []
    if end is None:
        return [f"No perplexity was measured beyond the trained {trained} tokens."]
    at = {label: float(points[end]["perplexity"]) for label, points in drawn.items()}
    text = {label: tables.perplexity_text(value) for label, value in at.items()}
    held = tables.control(results).get(end, {}).get("perplexity")
    plain = next((label for label in drawn if tables.keys(results)[label] == tables.PLAIN), None)
    far = [other for other in tables.shared_ends(results, beyond=True) if other <= end]
    patched = [label for label in drawn if label != plain]
    patched.sort(key=lambda label: _or_inf(tables.average(drawn[label], far)))
    best = patched[0] if patched else None
    among = f", the best of {len(patched)} methods," if len(patched) > 1 else ""

    headline = f"At {end:,}, beyond its trained {trained} tokens, the model's perplexity"
    if plain is not None:
        before = _or_inf(tables.average(drawn[plain], tables.shared_ends(results, beyond=False)))
        headline = f"Beyond its trained {trained} tokens the plain model's perplexity "
        headline += f"{'rises to' if at[plain] > 1.1 * before else 'is'} {text[plain]} at {end:,}"
        headline += ";" if best else f"{_against(at[plain], held)}. No method was evaluated"
    if best is not None:
        headline += f" with {name[best]}{among} {'is' if plain is None else 'it is'} {text[best]}"
        if plain is not None and at[best] > at[plain]:
            headline += ", higher than without a patch"
        headline += _against(at[best], held)
    sentences = [f"{headline}."]
    if len(patched) > 1:
        others = [f"{name[label]} reads {text[label]}" for label in patched[1:]]
        sentences.append(f"At {end:,} {_and(others)}.")
    if plain is not None and best is not None:
        sentences += _cost(results, plain, best)
    return sentences


def _against(value: float, held: Any) -> str:
    """How a perplexity compares with the control's, where there is one."""
    change = tables.ratio(value, None if held is None else float(held))
    if change is None or not math.isfinite(change):
        return ""
    percent = f"{abs(change - 1):.1%}"
    if not 0.5 < change < 2:
        relation = f"{change:,.{0 if change >= 10 else 1 if change >= 2 else 2}f} times"
    elif percent == "0.0%":
        relation = "level with"
    else:
        relation = f"{percent} {'above' if change > 1 else 'below'}"
    return f", {relation} the control's {tables.perplexity_text(held)}"


def _cost(results: dict[str, Any], plain: str, label: str) -> list[str]:
    """What a method costs where the plain model needs no help."""
    near, drawn = tables.shared_ends(results, beyond=False), tables.curves(results)
    before, after = tables.average(drawn[plain], near), tables.average(drawn[label], near)
    change = tables.ratio(after, before)
    if change is None or not math.isfinite(change):
        return []
    text = [tables.perplexity_text(value) for value in (before, after)]
    does = f"{'raises' if change > 1 else 'lowers'} perplexity from {text[0]} to {text[1]}"
    does = f"leaves perplexity at {text[0]}" if text[0] == text[1] else does
    place = f"Up to {results['run']['trained_length']:,} tokens"
    return [f"{place} {tables.names(results)[label]} {does} ({tables.change_text(change)})."]


def _retrieval_verdict(results: dict[str, Any], task: dict[str, Any]) -> list[str]:
    trained = results["run"]["trained_length"]
    sentences = []
    for beyond, place in ((True, "beyond"), (False, "up to")):
        counts = {}
        for label, name in tables.names(results).items():
            cells = task["cells"].get(label) or []
            chosen = [cell for cell in cells if (cell["length"] > trained) == beyond]
            if n := sum(cell["n"] for cell in chosen):
                name = f"the {name}" if name == "plain model" else name
                counts[name] = sum(cell["hits"] for cell in chosen), n
        where = f"In texts {place} {trained:,} tokens"
        if len(counts) > 1 and len(set(counts.values())) == 1:
            hits, n = next(iter(counts.values()))
            sentences.append(f"{where} each finds {hits} of {n} needles.")
        elif counts:
            texts = [f"{name} {hits} of {n}" for name, (hits, n) in counts.items()]
            first, (hits, n) = next(iter(counts.items()))
            texts[0] = f"{first} finds {hits} of {n} needles"
            sentences.append(f"{where} {_and(texts)}.")
    return sentences


def _content(results: dict[str, Any]) -> dict[str, Any]:
    """What both templates show."""
    run, perplexity = results["run"], results.get("perplexity") or {}
    tasks, few = tables.retrievals(results), []
    for task in tasks:
        few += [c for cells in task["cells"].values() for c in cells if c["n"] < 10]
    ends = [end for points in tables.curves(results).values() for end in points]
    ends += [length for task in tasks for length in task["lengths"]]
    name, key = tables.names(results), tables.keys(results)
    unpatched = dict.fromkeys(("method", "paper", "options", "rope_parameters"))
    return {
        "title": tables.one_line(run.get("name") or run.get("model")),
        "where": "beyond" if max(ends, default=0) > run["trained_length"] else "within",
        "trained": run["trained_length"],
        "farthest": max(ends, default=None),
        "verdict": verdict(results),
        "command": run.get("command"),
        "perplexity": perplexity,
        "control": perplexity["control"] if tables.control(results) else {},
        "few": _FEW if few else "",
        "perplexity_tables": tables.perplexity_tables(results),
        "retrieval": [
            (
                task["task"],
                _TASKS.get(task["task"], ""),
                heatmap.name(task),
                tables.retrieval_tables(results, task),
            )
            for task in tasks
        ],
        "stretch": _STRETCH,
        "limits": _LIMITS + (_CONTROL,) * bool(tables.control(results)) + _following(results),
        "facts": _facts(results),
        "methods": [
            unpatched | method | {"name": name[method["label"]], "key": key[method["label"]]}
            for method in results["methods"]
        ],
    }


def _following(results: dict[str, Any]) -> tuple[str, ...]:
    following = [m["label"] for m in results["methods"] if m.get("follows_length")]
    if not following or not tables.curves(results):
        return ()
    trained = results["run"]["trained_length"]
    return (_FOLLOWING.format(names=", ".join(following), trained=trained),)


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of "What was run"; those without a value are left out."""
    run, perplexity = results["run"], results.get("perplexity") or {}
    count, memory = run.get("parameters"), run.get("peak_memory")
    geometry = run.get("geometry") or {}
    rotation = []
    for layer, g in geometry.items():
        text = f"theta {g['theta']:,.10g}, head_dim {g['head_dim']}"
        if g.get("rotary_dim", g["head_dim"]) != g["head_dim"]:
            text += f" ({g['rotary_dim']} of them rotate)"
        rotation.append(text if len(geometry) == 1 else f"{layer}: {text}")
    seconds = dict(run.get("seconds") or {})
    total = seconds.pop("total", None)
    parts = ", ".join(f"{part} {_duration(value)}" for part, value in seconds.items())
    took = "" if total is None else _duration(total)
    text = perplexity.get("text", "")
    if text:
        text += f", {perplexity['tokens']:,} tokens in windows of {perplexity['window']:,}"
    facts = {
        "Model": run.get("model"),
        "Architecture": run.get("architecture"),
        "Parameters": f"{count:,}" if count else None,
        "Weights": run.get("weights"),
        "Trained length": f"{run['trained_length']:,} tokens",
        "Rotation": "; ".join(rotation),
        "Precision": run.get("dtype"),
        "Attention kernel": run.get("attention"),
        "Device": run.get("device"),
        "Text": text,
        "Seed": run.get("seed"),
        "Versions": ", ".join(f"{k} {v}" for k, v in (run.get("versions") or {}).items()),
        "Date": re.sub(r"T(\d\d:\d\d).*(\+00:00|Z)$", r" \1 UTC", str(run.get("date") or "")),
        "Time": f"{took} ({parts})" if took and parts else took or parts,
        "Peak memory": f"{memory / 1e9:.2f} GB" if memory else None,
    }
    return [(k, tables.one_line(v)) for k, v in facts.items() if v is not None and v != ""]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def render(template: str, page: dict[str, Any]) -> str:
    """A page made from a template of this folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": _markdown, "arxiv": _arxiv, "json": to_json}
    environment.filters["heat"] = figures.heat_colours
    environment.globals |= {"palette": figures.PALETTE, "heat": figures.HEAT}
    return environment.get_template(template).render(page)


def _markdown(text: Any) -> str:
    """Text that Markdown shows as it is, also in a table."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$])", r"\\\1", tables.one_line(text))


def _arxiv(paper: Any) -> str | None:
    found = re.search(r"arXiv:(\d{4}\.\d{4,5})", str(paper))
    return f"https://arxiv.org/abs/{found[1]}" if found else None


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON, which other programs read too."""
    return json.dumps(_strict(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _strict(value: Any) -> Any:
    """JSON has no infinity: such numbers become strings that `float()` and `Number()` read."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _or_inf(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _and(texts: list[str]) -> str:
    if len(texts) > 4:
        return ", ".join(texts[:4]) + f"; the tables show {len(texts) - 4} more"
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
