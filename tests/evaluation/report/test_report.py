"""Test the report: a self-contained page with the same content as its Markdown and JSON."""

import copy
import json
import math
import re
from html.parser import HTMLParser

import pytest
from helpers.report_results import TRAINED, many, method, results, retrieval

from rope_patch.evaluation import RunStatistics, write_report
from rope_patch.utils import verify_checksum

pytest.importorskip("jinja2")
image = pytest.importorskip("matplotlib.image")

VOID = {"meta", "br", "hr", "img", "link", "input", "col"}
FOLDS = re.compile(r"</?details>|<summary>[^<]*</summary>")
PICTURES = {"accuracy", "answers", "perplexity", "sliding", "stretch"}


@pytest.fixture
def small():
    """Return results of few tasks and lengths with all parts, for fast reports."""
    few = retrieval("rp_niah_single_1", lengths=(2048, 8192), count=12)
    return results() | {"retrieval": [few]}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Write a whole report, figures included."""
    folder = tmp_path_factory.mktemp("drawn")
    write_report(results(), folder)
    return folder


class Page(HTMLParser):
    """Check nesting, and collect references, tags, headings and the text of number cells."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.ids, self.cells = [], [], [], []
        self.references, self.headings = [], []
        self.in_cell, self.text = False, ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag == "td" and "number" in (dict(attrs).get("class") or ""):
            self.cells.append("")
            self.in_cell = True

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "srcset"):
                self.references.append((tag, key, value or ""))
            if key == "id":
                self.ids.append(value or "")
            assert not key.startswith("on")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data
        if self.in_cell:
            self.cells[-1] += data


def markdown_of(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def results_of(folder):
    text = (folder / "report.json").read_text(encoding="utf-8")
    return verify_checksum(text, "report.json")


def tables_in(markdown):
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.M)]


def normalised(cells):
    return [re.sub(r"[\s()\\]", "", cell) for cell in cells]


def check_same_content(page, folder):
    """Compare the numbers of all tables but those of facts, and the pictures."""
    markdown = markdown_of(folder)
    cells = [
        cell
        for head, _, *rows in tables_in(markdown)
        if head != "| | |"
        for row in rows
        for cell in row.strip("| ").split(" | ")[1:]
    ]
    assert normalised(page.cells) == normalised(cells)
    linked = set(re.findall(r"\(figures/([\w-]+\.png)\)", markdown))
    assert linked == {path.name for path in (folder / "figures").glob("*")}
    steps = zip([0, *page.headings], page.headings, strict=False)
    assert all(after <= before + 1 for before, after in steps)
    assert len(page.ids) == len(set(page.ids))


def change_samples(**changes):
    """Return a change of all samples of some methods, whose names begin with the keywords'."""

    def change(measured):
        for label, rows in measured["retrieval"][0]["samples"].items():
            for row in rows:
                row |= changes.get(label.split()[0], {})

    return change


def without_methods(measured):
    """Let one method be of no sample, and another one have none left."""
    samples = measured["retrieval"][0]["samples"]
    del samples["linear ×2"]
    samples["yarn ×2"] = []
    measured["short"][0]["samples"]["yarn ×2"] = [None] * 80


def with_long_names(measured):
    measured["methods"][1]["follows_length"] = True
    names = [f"a method with a long name {i}" for i in range(12)]
    measured["methods"].extend(map(method, names))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(perplexity=None),
        lambda r: r.update(retrieval=[]),
        lambda r: r.update(perplexity=None, retrieval=[], short=[], cost={}, control=[]),
        lambda r: r.update(short=[], cost={}, control=[], harness=[]),
        lambda r: r["perplexity"].update(control=None, key_tokens=None, sliding=None),
        lambda r: (r["perplexity"]["control"].update(losses=[{}, {}]), r["methods"].pop(0)),
        lambda r: r["perplexity"].update(documents=[], losses={}, control=None),
        lambda r: r.update(methods=r["methods"][:1]),
        lambda r: r["run"].update(trained_length=32768),
        lambda r: r["run"].update(trained_length=16),
        lambda r: r.update(run={"model": "tiny", "trained_length": TRAINED}),
        with_long_names,
        without_methods,
        change_samples(none={"score": None, "error": "no"}),
        change_samples(none={"log_likelihood": None}, yarn={"score": 1 / 3}),
    ],
)
def test_a_report_renders_with_any_part_missing(small, tmp_path, change):
    change(small)
    check_same_content(Page(write_report(small, tmp_path)), tmp_path)
    written = results_of(tmp_path)
    labels = {method["label"] for method in small["methods"]}
    screen = written.pop("first_screen")
    assert written.pop("usable").keys() == screen["methods"].keys() == labels
    assert f"**{screen['headline']}**" in markdown_of(tmp_path)
    assert len(screen["headline"].split()) <= 14
    assert written == json.loads(json.dumps(small))


def test_html_needs_no_other_file(drawn):
    path = drawn / "report.html"
    page = Page(path)
    assert not {"link", "iframe", "object", "embed", "img"} & set(page.tags)
    for tag, key, value in page.references:
        arxiv = tag == "a" and value.startswith("https://arxiv.org/abs/")
        assert arxiv or value.startswith("#"), key
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text
    assert {value[1:] for _, _, value in page.references if value[0] == "#"} <= set(page.ids)
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert path.stat().st_size < 2e6


def test_figures_are_valid_show_something_and_have_names(drawn):
    for path in (drawn / "figures").glob("*.png"):
        pixels = image.imread(path)
        assert pixels.shape[1] > 400
        assert pixels[..., :3].std() > 0.02
    heat = {"retrieval-rp_niah_single_1", "retrieval-rp_niah_multikey_1_ll"}
    assert {path.stem for path in (drawn / "figures").glob("*.png")} == PICTURES | heat
    html = (drawn / "report.html").read_text(encoding="utf-8")
    titles = re.findall(r'<svg role="img"[^>]*>\s*<title>([^<]+)</title>', html)
    assert len(titles) == html.count("<svg") == 2 * len(PICTURES)


def test_same_results_make_the_same_report(small, tmp_path):
    small["perplexity"] = None
    small["methods"].pop()
    first = write_report(small, tmp_path / "a").read_bytes()
    assert write_report(small, tmp_path / "b").read_bytes() == first


@pytest.mark.usefixtures("undrawn")
def test_pictures_of_an_earlier_report_are_deleted(small, tmp_path):
    write_report(small, tmp_path)
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    write_report(small | {"perplexity": None}, tmp_path)
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert names == {"accuracy", "answers", "stretch", "retrieval-rp_niah_single_1", "mine"}


@pytest.mark.usefixtures("undrawn")
def test_hostile_strings_stay_text(small, tmp_path):
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
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", markdown_of(tmp_path), flags=re.M | re.S)
    outside = FOLDS.sub("", outside)
    assert not re.search(r"(?<!\\)<\w|(?<!\\)\]\(http|^# h", outside, flags=re.M)
    for rows in tables_in(outside):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


@pytest.mark.usefixtures("undrawn")
def test_a_failure_leaves_an_earlier_report_untouched(small, tmp_path):
    def contents():
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


@pytest.mark.usefixtures("undrawn")
def test_a_usable_length_is_the_same_in_all_forms(tmp_path):
    """The plain model is usable up to 4,096 tokens by construction; yarn has too few texts."""
    shown = []
    page = Page(write_report(results(), tmp_path, shown.append))
    usable = {label: RunStatistics(results()).usable_length(label) for label in ("none", "yarn ×2")}
    assert str(usable["none"]) == "4,096 tokens (2,048 to 6,144)"
    assert usable["yarn ×2"].text == "not shown"
    stored = results_of(tmp_path)
    for each in usable.values():
        assert f"{each.text} ({each.interval_text})" in markdown_of(tmp_path)
        assert f"{each.text}{each.interval_text}" in {re.sub(r"\s+", " ", c) for c in page.cells}
        for text in (" ".join(shown[0].split()), page.text, stored["first_screen"]["usable"]):
            assert str(each) in text
    assert stored["usable"]["none"]["all"] == {
        **{
            "estimate": 4096,
            "low": 2048,
            "high": 6144,
            "texts_needed": stored["usable"]["none"]["all"]["texts_needed"],
        },
        "lengths": [2048, 4096, 6144, 8192],
    }
    stored["usable"]["none"]["all"]["low"] = 8192  # what is stored is computed anew
    write_report(stored, tmp_path)
    assert results_of(tmp_path)["usable"]["none"]["all"]["low"] == 2048


def test_infinite_losses_and_zero_frequencies_render(small, tmp_path, request):
    small |= {"retrieval": [], "control": [], "short": [], "harness": [], "cost": {}}
    small["perplexity"]["losses"]["none"][0][-1] = math.inf
    small["perplexity"]["losses"]["linear ×2"] = [[math.inf] * 128] * 2
    small["perplexity"]["losses"]["yarn ×2"][1][-2] = 700.0
    small["methods"][1]["frequencies"]["all"]["inv_freq"][-1] = 0.0
    page = Page(write_report(small, tmp_path))
    assert any(cell.startswith("∞") for cell in page.cells)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    again = json.loads(text, parse_constant=pytest.fail)  # called for what JSON does not know
    assert float(again["perplexity"]["losses"]["none"][0][-1]) == math.inf
    request.getfixturevalue("undrawn")
    assert Page(write_report(results_of(tmp_path), tmp_path)).cells == page.cells


@pytest.mark.usefixtures("undrawn")
def test_a_control_with_half_the_context_has_a_row_and_old_results_none(small, tmp_path):
    first = small["perplexity"]["control"]
    assert not (old := RunStatistics(small)).short_control
    losses = [{end: math.log(40.0) for end in ends} for ends in first["losses"]]
    small["perplexity"] |= {"short_control": {"context": 1024, "losses": losses}}
    new = RunStatistics(small)
    assert len(new.short_control) == len(new.control) > 0
    assert all(i.estimate == pytest.approx(40.0) for i in new.short_control.values())
    for label in new.losses:  # compared with the first control alone
        assert new.ratio_to_control(label) == old.ratio_to_control(label)
    write_report(small, tmp_path)
    rows = re.findall(r"^\| text cut to ([\d,]+) \|", markdown_of(tmp_path), flags=re.M)
    assert rows == ["2,048", "1,024"]


@pytest.mark.usefixtures("undrawn")
def test_what_a_page_marks_and_says_of_its_samples(small, tmp_path):
    """Values beyond the trained length, few samples a cell, and the geometry by layer type."""
    for part in (small["methods"][1]["frequencies"], small["run"]["geometry"]):
        part |= {"full_attention": part["all"], "sliding_attention": part.pop("all")}
    path = write_report(small, tmp_path)
    html = path.read_text(encoding="utf-8")
    heads = re.findall(r'<th scope="col" class="number( beyond)?">([\d,]+)</th>', html)
    lengths = [(int(text.replace(",", "")), bool(beyond)) for beyond, text in heads]
    assert {(length > TRAINED, beyond) for length, beyond in lengths} == {(True,) * 2, (False,) * 2}
    text = Page(path).text
    assert "full_attention: theta 10,000" in text
    assert "sliding_attention: theta 10,000" in text
    note = "fewer than 10 samples a cell"
    assert note in text
    small["retrieval"] = [retrieval("rp_niah_single_1", lengths=(2048,), count=30)]
    assert note not in Page(write_report(small, tmp_path)).text


@pytest.mark.usefixtures("undrawn")
def test_a_task_without_any_difference_is_one_line(small, tmp_path):
    for rows in small["retrieval"][0]["samples"].values():
        for sample in rows:
            sample["score"] = 0.0
    page = Page(write_report(small, tmp_path))
    assert page.text.count("niah_single_1: 0 of 72 answers are right") == 1
    assert "Accuracy by depth" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_several_runs_render_side_by_side(small, tmp_path):
    other = copy.deepcopy(small)
    other["run"] |= {"name": "Other-2B", "trained_length": 2048, "weights": "others"}
    printed = []
    page = Page(write_report([small, other], tmp_path, printed.append))
    check_same_content(page, tmp_path)
    title, *lines = "".join(printed).splitlines()
    assert title.endswith("2 evaluations: Tiny-1B, Other-2B")
    assert title in page.text
    starts = [line.split(": ")[0] for line in lines if line.startswith(("Tiny-1B: ", "Other-2B: "))]
    assert starts == ["Tiny-1B", "Other-2B"]
    rows = [line for line in lines if line.startswith(("  Tiny-1B, ", "  Other-2B, "))]
    assert len(rows) == 2 * len(small["methods"])
    assert page.headings[0] == 1
    pictures = {path.name.split("-")[0] for path in (tmp_path / "figures").glob("*")}
    assert pictures == {"run1", "run2"}
    loaded = results_of(tmp_path)
    assert [run["run"]["name"] for run in loaded["runs"]] == ["Tiny-1B", "Other-2B"]
    assert Page(write_report(loaded, tmp_path)).cells == page.cells
    small["perplexity"] = None
    page = Page(write_report([small, small], tmp_path))  # of the same name: numbered
    assert "Tiny-1B (1), Tiny-1B (2)" in page.text


@pytest.mark.usefixtures("undrawn")
def test_runs_on_the_same_samples_are_merged(small, tmp_path):
    def only(*labels):
        part = copy.deepcopy(small)
        part["methods"] = [m for m in part["methods"] if m["label"] in labels]
        whole = part["perplexity"]
        for entry, key in [
            *((entry, "losses") for entry in (whole, whole["sliding"], whole["key_tokens"])),
            *((entry, "samples") for entry in [*part["retrieval"], *part["short"]]),
            *((entry, "metrics") for entry in part["harness"]),
            (part, "cost"),
        ]:
            entry[key] = {k: v for k, v in entry[key].items() if k in labels}
        return part

    expected = Page(write_report(small, tmp_path)).cells
    first, second = only("none", "yarn ×2"), only("none", "linear ×2")
    assert Page(write_report([first, second], tmp_path)).cells == expected
    runs = results_of(tmp_path)["runs"]
    shown = [(set(run.pop("usable")), run.pop("first_screen")["method"]) for run in runs]
    assert [labels for labels, _ in shown] == [
        {"none", "yarn ×2"},
        {"none", "linear ×2"},
    ]
    assert runs == json.loads(json.dumps([first, second]))
    second["retrieval"][0]["samples"]["linear ×2"][0]["id"] = "of another sample"
    assert "2 evaluations" in Page(write_report([first, second], tmp_path)).text


@pytest.mark.usefixtures("undrawn")
def test_markdown_has_the_order_of_the_page(tmp_path):
    check_same_content(Page(write_report(many(), tmp_path)), tmp_path)
    markdown = markdown_of(tmp_path)
    marks = ["**", "Usable length", "figures/answers", "| method |", "6 more rows"]
    marks += ["Differences, intervals and tests", "How to read this"]
    places = [markdown.index(mark) for mark in marks]
    assert places == sorted(places)
    first = markdown[places[3] : places[4]]
    assert len(re.findall(r"^\|", first, flags=re.M)) == 2 + 8
    assert markdown.count("<details>") == markdown.count("</details>") > 3
