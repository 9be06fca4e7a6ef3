"""The report: one page that needs nothing else, honest about what the numbers say."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
image = pytest.importorskip("matplotlib.image")

from rope_patch.eval.report import verdict, write_report  # noqa: E402

WINDOW, TRAINED = 1024, 4096
VOID = {"meta", "br", "hr", "img", "link"}


def point(end: int, perplexity: float) -> dict[str, Any]:
    nll = math.log(perplexity) if math.isfinite(perplexity) else 1000.0
    return {"end": end, "tokens": WINDOW, "nll": nll, "perplexity": perplexity}


def curve(*perplexities: float) -> list[dict[str, Any]]:
    return [point(WINDOW * i, value) for i, value in enumerate(perplexities, 1)]


def method(label: str) -> dict[str, Any]:
    unscaled = [10000.0 ** (-i / 16) for i in range(16)]
    inv_freq = [f / (1 + i / 15) for i, f in enumerate(unscaled)]
    spelling = {"rope_type": "yarn", "factor": 2.0}
    frequencies = {"unscaled": unscaled, "inv_freq": inv_freq, "attention_factor": 1.07}
    named = {"label": label, "method": "yarn", "paper": "YaRN, arXiv:2309.00071"}
    size = {"factor": 2.0, "length": 8192, "options": {"factor": 2.0}}
    return named | size | {"rope_parameters": spelling, "frequencies": {"all": frequencies}}


def cells(hits: dict[int, int]) -> list[dict[str, Any]]:
    return [
        {"length": n, "depth": depth, "n": 2, "hits": h, "answer_probability": 0.25 + h / 3}
        for n, h in hits.items()
        for depth in (10, 90)
    ]


@pytest.fixture
def results() -> dict[str, Any]:
    rotation = {"head_dim": 32, "rotary_dim": 16, "theta": 1e4, "trained_length": TRAINED}
    run = {"model": "tiny", "name": "Tiny-1B", "parameters": 1234567, "dtype": "float32"}
    run |= {"trained_length": TRAINED, "geometry": {"all": rotation}, "seed": 42}
    run |= {"date": "2026-11-21T09:30:00+00:00", "seconds": {"perplexity": 40.2, "total": 3731.9}}
    run |= {"peak_memory": 2400000000, "versions": {"torch": "2.13.0"}, "command": "rope-patch x"}
    curves = {
        "none": curve(20.0, 18.0, 17.0, 16.0, 40.0, 90.0, 200.0, 397.0),
        "yarn ×2": curve(20.2, 18.2, 17.2, 16.2, 15.5, 15.4, 15.3, 15.2),
        "linear ×2": curve(33.0, 34.0, 35.0, 33.0, 34.0, 34.1, 34.2, 34.3),
    }
    control = {"context": 2048, "points": [point(4096, 16.1), point(8192, 15.31)]}
    text = {"text": "emma", "tokens": 8192, "window": WINDOW}
    found = {"none": cells({2048: 2, 6144: 0}), "yarn ×2": cells({2048: 2, 6144: 2})}
    found["linear ×2"] = cells({2048: 1, 6144: 1})
    task = {"task": "niah_single", "lengths": [2048, 6144], "depths": [10, 90], "cells": found}
    return {
        "run": run,
        "methods": [{"label": "none", "method": None}, method("yarn ×2"), method("linear ×2")],
        "perplexity": text | {"curves": curves, "control": control},
        "retrieval": [task],
    }


class Page(HTMLParser):
    """Checks nesting, and collects references, tags and the text of number cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.tags, self.ids, self.cells = (list[str]() for _ in range(4))
        self.references: list[tuple[str, str, str]] = []
        self.in_cell = False
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td" and "number" in (dict(attrs).get("class") or ""):
            self.cells.append("")
            self.in_cell = True

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "srcset"):
                self.references.append((tag, key, value or ""))
            if key == "id":
                self.ids.append(value or "")
            assert not key.startswith("on")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self.in_cell:
            self.cells[-1] += data


def bare(found: list[str]) -> list[str]:
    return [re.sub(r"[\s()\\]", "", cell) for cell in found]


def markdown_cells(text: str) -> list[str]:
    rows = re.findall(r"^\| (.*) \|$", text[: text.index("## What was run")], flags=re.M)
    rows = [row for row in rows if not re.match(r"(position|average|depth) \|", row)]
    return [cell for row in rows for cell in row.split(" | ")[1:]]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: None,
        lambda r: r.update(perplexity=None),
        lambda r: r.update(retrieval=None),
        lambda r: r.update(perplexity=None, retrieval=None),
        lambda r: r.update(retrieval=r["retrieval"][0]),
        lambda r: r["perplexity"].update(control=None),
        lambda r: r["perplexity"]["control"].update(points=[]),
        lambda r: r.update(methods=r["methods"][:1]),
        lambda r: r.update(methods=r["methods"][1:2]),
        lambda r: r["run"].update(trained_length=32768),
        lambda r: r["run"].update(trained_length=16),
        lambda r: r.update(run={"model": "tiny", "trained_length": TRAINED}),
        lambda r: r["methods"].extend(method(f"a method with a long name {i}") for i in range(12)),
    ],
)
def test_whatever_was_measured_renders(results: Any, tmp_path: Path, change: Any) -> None:
    change(results)
    page = Page(write_report(results, tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert bare(page.cells) == bare(markdown_cells(markdown))
    linked = set(re.findall(r"\(figures/([\w-]+\.png)\)", markdown))
    assert linked == {path.name for path in (tmp_path / "figures").glob("*")}
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == results


def test_html_needs_no_other_file(results: dict[str, Any], tmp_path: Path) -> None:
    page = Page(write_report(results, tmp_path))
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(page.tags)
    for tag, key, value in page.references:
        assert value.startswith("https://arxiv.org/abs/" if tag == "a" else "#"), key
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {value[1:] for _, _, value in page.references if value[0] == "#"} <= set(page.ids)
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", text))


def test_same_results_make_the_same_report(results: Any, tmp_path: Path) -> None:
    first = write_report(results, tmp_path / "a").read_bytes()
    assert write_report(results, tmp_path / "b").read_bytes() == first


def test_hostile_strings_stay_text(results: dict[str, Any], tmp_path: Path) -> None:
    bad = "<script>alert('x')</script> \"><b> | `rm` $x^2$ [a](http://e.com) *s*\n# h"
    results["run"] |= {"name": bad, "versions": {bad: bad}, "command": f"{bad}\n```\n# h"}
    results["perplexity"]["text"] = results["retrieval"][0]["task"] = bad
    label = f"_{bad}"
    results["methods"][1] |= {"label": label, "paper": bad, "rope_parameters": {bad: bad}}
    for part in (results["perplexity"]["curves"], results["retrieval"][0]["cells"]):
        part[label] = part.pop("yarn ×2")
    page = Page(write_report(results, tmp_path))
    assert not {"script", "b"} & set(page.tags)
    assert "<script>alert('x')</script>" in page.text
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", markdown, flags=re.M | re.S)
    assert not re.search(r"(?<!\\)<\w|(?<!\\)\]\(http|^# h", outside, flags=re.M)
    for table in re.findall(r"(?:^\|.*\n)+", outside, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_figures_are_valid_and_show_something(results: dict[str, Any], tmp_path: Path) -> None:
    write_report(results, tmp_path)
    for path in (tmp_path / "figures").glob("*.png"):
        pixels = image.imread(path)
        assert pixels.shape[1] > 500
        assert pixels[..., :3].std() > 0.02
    write_report(results | {"perplexity": None}, tmp_path)  # which has no use for the first
    left = {path.name for path in (tmp_path / "figures").iterdir()}
    assert left == {"stretch.png", "retrieval-niah_single.png"}


def test_a_failure_leaves_an_earlier_report_untouched(results: Any, tmp_path: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    write_report(results, tmp_path)
    before = contents()
    results["run"]["name"] = "another"
    del results["perplexity"]["curves"]["yarn ×2"][3]["perplexity"]
    with pytest.raises(KeyError):  # while drawing
        write_report(results, tmp_path)
    with pytest.raises(TypeError):  # while rendering
        write_report(results | {"perplexity": None, "text": {"no", "JSON"}}, tmp_path)
    assert contents() == before


def test_infinite_perplexity(results: dict[str, Any], tmp_path: Path) -> None:
    results["perplexity"]["curves"]["none"][7] = point(8192, math.inf)
    results["perplexity"]["curves"]["linear ×2"][6] = point(7168, 1e300)
    results["methods"][1]["frequencies"]["all"]["inv_freq"][-1] = 0.0
    page = Page(write_report(results, tmp_path))
    assert "∞" in page.cells
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    again = json.loads(text, parse_constant=pytest.fail)  # called for what JSON does not know
    assert float(again["perplexity"]["curves"]["none"][7]["perplexity"]) == math.inf
    assert Page(write_report(again, tmp_path)).cells == page.cells
    results["perplexity"] |= {"curves": {"none": curve(*[math.inf] * 8)}, "control": None}
    Page(write_report(results, tmp_path))


def test_missing_probability_and_unmeasured_cells(results: Any, tmp_path: Path) -> None:
    measured = results["retrieval"][0]["cells"]
    measured["yarn ×2"] = [measured["yarn ×2"][0] | {"answer_probability": None}]
    assert {"2/2", "–"} <= set(Page(write_report(results, tmp_path)).cells)


def test_several_layer_types_and_tasks(results: dict[str, Any], tmp_path: Path) -> None:
    for part in (results["methods"][1]["frequencies"], results["run"]["geometry"]):
        part |= {"full_attention": part["all"], "sliding_attention": part.pop("all")}
    results["retrieval"].append(results["retrieval"][0] | {"task": "niah_single_likelihood"})
    text = Page(write_report(results, tmp_path)).text
    titles = ("full attention", "sliding attention", "Retrieval: niah_single_likelihood")
    assert all(title in text for title in titles)


def test_values_beyond_the_trained_length_are_marked(results: Any, tmp_path: Path) -> None:
    html = write_report(results, tmp_path).read_text(encoding="utf-8")
    heads = re.findall(r'<th scope="col" class="number( beyond)?">([\d,]+)</th>', html)
    lengths = [(int(text.replace(",", "")), bool(beyond)) for beyond, text in heads]
    assert {(length > TRAINED, beyond) for length, beyond in lengths} == {(True,) * 2, (False,) * 2}


def test_verdict_names_what_was_gained(results: dict[str, Any]) -> None:
    sentences = verdict(results)
    assert sentences[0] == (
        "Beyond its trained 4,096 tokens the plain model's perplexity rises to 397 at 8,192; with "
        "yarn ×2, the best of 2 methods, it is 15.2, 0.7% below the control's 15.3."
    )
    found = "the plain model finds 0 of 4 needles, yarn ×2 4 of 4 and linear ×2 2 of 4."
    assert sentences[1] == f"In texts beyond 4,096 tokens {found}"
    assert "At 8,192 linear ×2 reads 34.3." in sentences
    assert "Up to 4,096 tokens yarn ×2 raises perplexity from 17.7 to 17.9 (+1.1%)." in sentences


def test_verdict_says_so_if_the_patch_is_worse(results: dict[str, Any]) -> None:
    results["perplexity"]["curves"] |= {"none": curve(*[16.0] * 8), "yarn ×2": curve(*[64.0] * 8)}
    assert verdict(results)[0].endswith(
        "is 16.0 at 8,192; with linear ×2, the best of 2 methods, it is 34.3, higher than without "
        "a patch, 2.2 times the control's 15.3."
    )


def test_verdict_compares_only_where_the_control_was_measured(results: dict[str, Any]) -> None:
    results["perplexity"]["control"]["points"] = [point(4096, 16.1)]
    assert "control" not in " ".join(verdict(results))


def test_verdict_looks_no_farther_than_the_methods_are_meant_for(results: dict[str, Any]) -> None:
    results["perplexity"]["control"] = None
    for patched in results["methods"][1:]:
        patched["length"] = 6144
    assert "rises to 90.0 at 6,144; with" in verdict(results)[0]


def test_verdict_without_a_measurement_claims_nothing(results: dict[str, Any]) -> None:
    assert verdict(results | {"perplexity": None, "retrieval": None}) == ["Nothing was measured."]
    results["run"]["trained_length"] = 32768
    assert verdict(results)[0] == "No perplexity was measured beyond the trained 32,768 tokens."


def test_few_samples_are_no_rate(results: dict[str, Any], tmp_path: Path) -> None:
    note = "With fewer than 10 tries"
    assert note in Page(write_report(results, tmp_path)).text
    results["retrieval"][0]["cells"] = {"none": [cells({2048: 2})[0] | {"n": 10}]}
    assert note not in Page(write_report(results, tmp_path)).text


def test_the_package_does_not_need_matplotlib() -> None:
    code = "import rope_patch, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
