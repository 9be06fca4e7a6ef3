"""Test the report: a self-contained page with the same content as its Markdown and JSON."""

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
from report_results import TRAINED, many, method, results, retrieval

pytest.importorskip("jinja2")
image = pytest.importorskip("matplotlib.image")

from matplotlib.figure import Figure  # noqa: E402

from rope_patch.evaluation.report.results.run_statistics import RunStatistics  # noqa: E402
from rope_patch.evaluation.report.retrieval_tables import tables  # noqa: E402
from rope_patch.evaluation.report.writer import write_report  # noqa: E402
from rope_patch.utils.checksums import verify_checksum  # noqa: E402

VOID = {"meta", "br", "hr", "img", "link", "input", "col"}
FOLDS = re.compile(r"</?details>|<summary>[^<]*</summary>")
PICTURES = {"accuracy", "answers", "perplexity", "sliding", "stretch"}


@pytest.fixture
def small() -> dict[str, Any]:
    """Return results of few tasks and lengths with all parts, for fast reports."""
    measured = results()
    few: Any = {"lengths": (2048, 8192), "count": 12}
    return measured | {"retrieval": [retrieval("rp_niah_single_1", **few)]}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose figures without rendering them, which takes most of a report's time."""

    def save(_self: Any, file: Any, *, format: str, **_: Any) -> None:
        svg = '<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>'
        file.write(b"PNG" if format == "png" else svg)

    monkeypatch.setattr(Figure, "savefig", save)


class Page(HTMLParser):
    """Check nesting, and collect references, tags, headings and the text of number cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.tags, self.ids, self.cells = (list[str]() for _ in range(4))
        self.references: list[tuple[str, str, str]] = []
        self.headings: list[int] = []
        self.in_cell = False
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
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
        if not {"style", "script"} & set(self.open):
            self.text += data
        if self.in_cell:
            self.cells[-1] += data


def normalise_cells(cells: list[str]) -> list[str]:
    return [re.sub(r"[\s()\\]", "", cell) for cell in cells]


def markdown_cells(text: str) -> list[str]:
    """Return the cells of all tables except those of facts."""
    cells = []
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, _, *rows = table.splitlines()
        if head != "| | |":
            cells += [cell for row in rows for cell in row.strip("| ").split(" | ")[1:]]
    return cells


def without_losses(measured: dict[str, Any]) -> None:
    measured["perplexity"] |= {"losses": {}, "control": None}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "change",
    [
        lambda r: None,
        lambda r: r.update(perplexity=None),
        lambda r: r.update(retrieval=[]),
        lambda r: r.update(perplexity=None, retrieval=[]),
        lambda r: r.update(perplexity=None, retrieval=[], short=[], cost={}, control=[]),
        lambda r: r.update(short=[], cost={}, control=[], harness=[]),
        lambda r: r["perplexity"].update(control=None, key_tokens=None, sliding=None),
        lambda r: r["perplexity"]["control"].update(losses=[{}, {}]),
        lambda r: r["perplexity"].update(documents=[]),
        without_losses,
        lambda r: r.update(methods=r["methods"][:1]),
        lambda r: r.update(methods=r["methods"][1:2]),
        lambda r: r["run"].update(trained_length=32768),
        lambda r: r["run"].update(trained_length=16),
        lambda r: r.update(run={"model": "tiny", "trained_length": TRAINED}),
        lambda r: r["methods"].extend(method(f"a method with a long name {i}") for i in range(12)),
        lambda r: r["methods"][1].update(follows_length=True),
        lambda r: r["retrieval"][0]["samples"].pop("linear ×2"),
        lambda r: r["retrieval"][0]["samples"].update({"yarn ×2": []}),
        lambda r: [s.update(score=None, error="no") for s in r["retrieval"][0]["samples"]["none"]],
        lambda r: [s.update(log_likelihood=None) for s in r["retrieval"][0]["samples"]["none"]],
        lambda r: [s.update(score=1 / 3) for s in r["retrieval"][0]["samples"]["yarn ×2"]],
        lambda r: [s.update(score=0.0) for s in r["retrieval"][0]["samples"]["none"]],
        lambda r: r["short"][0]["samples"].update({"yarn ×2": [None] * 80}),
    ],
)
def test_a_report_renders_with_any_part_missing(small: Any, tmp_path: Path, change: Any) -> None:
    change(small)
    page = Page(write_report(small, tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert normalise_cells(page.cells) == normalise_cells(markdown_cells(markdown))
    linked = set(re.findall(r"\(figures/([\w-]+\.png)\)", markdown))
    assert linked == {path.name for path in (tmp_path / "figures").glob("*")}
    steps = zip([0, *page.headings], page.headings, strict=False)
    assert all(after <= before + 1 for before, after in steps)
    written = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert verify_checksum(written, "report.json") == json.loads(json.dumps(small))


def test_html_needs_no_other_file(tmp_path: Path) -> None:
    path = write_report(results(), tmp_path)
    page = Page(path)
    assert not {"link", "iframe", "object", "embed", "img"} & set(page.tags)
    for tag, key, value in page.references:
        arxiv = tag == "a" and value.startswith("https://arxiv.org/abs/")
        assert arxiv or value.startswith("#"), key
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {value[1:] for _, _, value in page.references if value[0] == "#"} <= set(page.ids)
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert path.stat().st_size < 2e6


def test_figures_are_valid_show_something_and_have_names(tmp_path: Path) -> None:
    html = write_report(results(), tmp_path).read_text(encoding="utf-8")
    for path in (tmp_path / "figures").glob("*.png"):
        pixels = image.imread(path)
        assert pixels.shape[1] > 400
        assert pixels[..., :3].std() > 0.02
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    heat = {"retrieval-rp_niah_single_1", "retrieval-rp_niah_multikey_1_ll"}
    assert drawn == PICTURES | heat
    titles = re.findall(r'<svg role="img"[^>]*>\s*<title>([^<]+)</title>', html)
    assert len(titles) == html.count("<svg") == 2 * len(PICTURES)


@pytest.mark.usefixtures("undrawn")
def test_pictures_of_an_earlier_report_are_deleted(small: Any, tmp_path: Path) -> None:
    write_report(small, tmp_path)
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    write_report(small | {"perplexity": None}, tmp_path)
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert names == {"accuracy", "answers", "stretch", "retrieval-rp_niah_single_1", "mine"}


def test_same_results_make_the_same_report(small: Any, tmp_path: Path) -> None:
    small["perplexity"] = None
    first = write_report(small, tmp_path / "a").read_bytes()
    assert write_report(small, tmp_path / "b").read_bytes() == first


@pytest.mark.usefixtures("undrawn")
def test_hostile_strings_stay_text(small: dict[str, Any], tmp_path: Path) -> None:
    bad = "<script>alert('x')</script> \"><b> | `rm` $x^2$ [a](http://e.com) *s*\n# h"
    label = f"_{bad}"
    small["run"] |= {"name": bad, "versions": {bad: bad}, "command": f"{bad}\n```\n# h"}
    small["run"] |= {"not_run": [bad], "hardware": {"cpu": bad, "gpu": [bad]}}
    small["perplexity"]["documents"][0]["name"] = bad
    small["perplexity"]["key_tokens"]["evaluator"] = bad
    small["retrieval"][0]["task"] = small["control"][0]["task"] = bad
    small["short"][0]["task"] = small["harness"][0]["task"] = bad
    small["harness"][0]["metrics"]["none"] = {bad: {"value": 1, "stderr": "N/A"}}
    small["methods"][1] |= {"label": label, "paper": bad, "rope_parameters": {bad: bad}}
    for part in (
        small["perplexity"]["losses"],
        small["perplexity"]["sliding"]["losses"],
        small["retrieval"][0]["samples"],
        small["short"][0]["samples"],
        small["cost"],
    ):
        part[label] = part.pop("yarn ×2")
    small["retrieval"][0]["samples"][label][0] |= {"score": None, "error": bad, "id": bad}
    page = Page(write_report(small, tmp_path))
    assert page.tags.count("script") == 1
    assert "b" not in page.tags
    assert "<script>alert('x')</script>" in page.text
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", markdown, flags=re.M | re.S)
    outside = FOLDS.sub("", outside)
    assert not re.search(r"(?<!\\)<\w|(?<!\\)\]\(http|^# h", outside, flags=re.M)
    for table in re.findall(r"(?:^\|.*\n)+", outside, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


@pytest.mark.usefixtures("undrawn")
def test_a_failure_leaves_an_earlier_report_untouched(small: Any, tmp_path: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    write_report(small, tmp_path)
    before = contents()
    small["run"]["name"] = "another"
    with pytest.raises(TypeError):  # while rendering
        write_report(small | {"text": {"no", "JSON"}}, tmp_path)
    del small["methods"][1]["frequencies"]["all"]["inv_freq"]
    with pytest.raises(KeyError):  # while drawing
        write_report(small, tmp_path)
    assert contents() == before


def test_infinite_losses_and_zero_frequencies_render(small: dict[str, Any], tmp_path: Path) -> None:
    small["perplexity"]["losses"]["none"][0][-1] = math.inf
    small["perplexity"]["losses"]["linear ×2"] = [[math.inf] * 128] * 2
    small["perplexity"]["losses"]["yarn ×2"][1][-2] = 700.0
    small["methods"][1]["frequencies"]["all"]["inv_freq"][-1] = 0.0
    page = Page(write_report(small, tmp_path))
    assert any(cell.startswith("∞") for cell in page.cells)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    again = json.loads(text, parse_constant=pytest.fail)  # called for what JSON does not know
    assert float(again["perplexity"]["losses"]["none"][0][-1]) == math.inf
    assert Page(write_report(verify_checksum(text, "report.json"), tmp_path)).cells == page.cells


@pytest.mark.usefixtures("undrawn")
def test_several_layer_types_are_listed(small: dict[str, Any], tmp_path: Path) -> None:
    for part in (small["methods"][1]["frequencies"], small["run"]["geometry"]):
        part |= {"full_attention": part["all"], "sliding_attention": part.pop("all")}
    text = Page(write_report(small, tmp_path)).text
    assert "full_attention: theta 10,000" in text
    assert "sliding_attention: theta 10,000" in text


@pytest.mark.usefixtures("undrawn")
def test_values_beyond_the_trained_length_are_marked(small: Any, tmp_path: Path) -> None:
    html = write_report(small, tmp_path).read_text(encoding="utf-8")
    heads = re.findall(r'<th scope="col" class="number( beyond)?">([\d,]+)</th>', html)
    lengths = [(int(text.replace(",", "")), bool(beyond)) for beyond, text in heads]
    assert {(length > TRAINED, beyond) for length, beyond in lengths} == {(True,) * 2, (False,) * 2}


def test_few_samples_are_no_rate(small: dict[str, Any], tmp_path: Path, undrawn: None) -> None:
    note = "With fewer than 10 samples a cell"
    assert note in Page(write_report(small, tmp_path)).text
    enough: Any = {"lengths": (2048,), "count": 30}
    small["retrieval"] = [retrieval("rp_niah_single_1", **enough)]
    assert note not in Page(write_report(small, tmp_path)).text


def test_significance_is_marked_and_explained() -> None:
    """30 of 30 against none is significant; equal scores are not."""
    few: Any = {"lengths": (2048, 8192), "count": 30}
    task = retrieval("rp_niah_single_1", **few)
    for label, scores in {"none": (1, 0), "yarn ×2": (1, 1), "linear ×2": (1, 0)}.items():
        for sample in task["samples"][label]:
            sample |= {"score": scores[sample["length"] > TRAINED], "text": sample["id"]}
    (table,) = tables(RunStatistics(results() | {"retrieval": [task]}))
    texts = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    assert texts == {
        "plain model": ["100%", "0%"],
        "yarn ×2": ["100%", "▲◆ 100%"],
        "linear ×2": ["100%", "0%"],
    }
    tip = table.rows[1].cells[1].tip
    assert "against the plain model +100.0 points" in tip
    assert "p < 0.001 after Holm over 2 methods; better than each other method, p < 0.001" in tip


@pytest.mark.usefixtures("undrawn")
def test_several_runs_render_side_by_side(small: dict[str, Any], tmp_path: Path) -> None:
    other = json.loads(json.dumps(small))
    other["run"] |= {"name": "Other-2B", "trained_length": 2048, "weights": "others"}
    printed: list[str] = []
    page = Page(write_report([small, other], tmp_path, printed.append))
    title, *lines = "".join(printed).splitlines()
    assert title == "2 evaluations: Tiny-1B, Other-2B"
    assert [line[:8] for line in lines if line.startswith(("Tiny-1B: ", "Other-2B: "))] == [
        "Tiny-1B:", "Other-2B",
    ]  # fmt: skip
    rows = [line for line in lines if line.startswith(("  Tiny-1B, ", "  Other-2B, "))]
    assert len(rows) == 2 * len(small["methods"])
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert normalise_cells(page.cells) == normalise_cells(markdown_cells(markdown))
    assert page.headings[0] == 1
    assert "2 evaluations: Tiny-1B, Other-2B" in page.text
    assert len(page.ids) == len(set(page.ids))
    linked = set(re.findall(r"\(figures/([\w-]+\.png)\)", markdown))
    assert linked == {path.name for path in (tmp_path / "figures").glob("*")}
    assert {name.split("-")[0] for name in linked} == {"run1", "run2"}
    loaded = verify_checksum((tmp_path / "report.json").read_text(encoding="utf-8"), "report.json")
    assert [run["run"]["name"] for run in loaded["runs"]] == ["Tiny-1B", "Other-2B"]
    assert Page(write_report(loaded, tmp_path)).cells == page.cells


@pytest.mark.usefixtures("undrawn")
def test_runs_of_the_same_name_are_numbered(small: dict[str, Any], tmp_path: Path) -> None:
    small["perplexity"] = None
    page = Page(write_report([small, small], tmp_path))
    assert "2 evaluations: Tiny-1B (1), Tiny-1B (2)" in page.text


@pytest.mark.usefixtures("undrawn")
def test_runs_on_the_same_samples_are_merged(small: Any, tmp_path: Path) -> None:
    def only(*labels: str) -> dict[str, Any]:
        part = json.loads(json.dumps(small))
        part["methods"] = [m for m in part["methods"] if m["label"] in labels]
        perplexity_parts = [
            part["perplexity"],
            part["perplexity"]["sliding"],
            part["perplexity"]["key_tokens"],
        ]
        for entry, key in [
            *((entry, "losses") for entry in perplexity_parts),
            *((entry, "samples") for entry in [*part["retrieval"], *part["short"]]),
            *((entry, "metrics") for entry in part["harness"]),
            (part, "cost"),
        ]:
            entry[key] = {k: v for k, v in entry[key].items() if k in labels}
        return part

    expected = Page(write_report(small, tmp_path)).cells
    first, second = only("none", "yarn ×2"), only("none", "linear ×2")
    assert Page(write_report([first, second], tmp_path)).cells == expected
    loaded = verify_checksum((tmp_path / "report.json").read_text(encoding="utf-8"), "report.json")
    assert loaded == {"runs": [first, second]}
    second["retrieval"][0]["samples"]["linear ×2"][0]["id"] = "of another sample"
    assert "2 evaluations" in Page(write_report([first, second], tmp_path)).text


def test_the_package_does_not_need_matplotlib() -> None:
    code = "import rope_patch, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("undrawn")
def test_a_task_without_any_difference_is_one_line(small: dict[str, Any], tmp_path: Path) -> None:
    for rows in small["retrieval"][0]["samples"].values():
        for sample in rows:
            sample["score"] = 0.0
    page = Page(write_report(small, tmp_path))
    line = "niah_single_1: 0 of 72 answers are right, whatever the method, length and depth."
    assert page.text.count(line) == 1
    assert "Accuracy by depth" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_markdown_has_the_order_of_the_page(tmp_path: Path) -> None:
    page = Page(write_report(many(), tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert normalise_cells(page.cells) == normalise_cells(markdown_cells(markdown))
    marks = [
        "**This run cannot decide ",
        "| method |",
        "6 more rows",
        "The numbers behind it",
        "## ",
    ]
    places = [markdown.index(mark) for mark in marks]
    assert places == sorted(places)
    first = markdown[places[1] : places[2]]
    assert len(re.findall(r"^\|", first, flags=re.M)) == 2 + 8
    assert markdown.count("<details>") == markdown.count("</details>") > 3
