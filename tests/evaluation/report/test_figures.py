"""Figures and numbers: a question each, a look a method, one unit for an interval."""

import itertools
import math
import random
import re
from xml.etree import ElementTree

import numpy
import pytest
from helpers.report_results import LABELS, many, perplexity, results, retrieval

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from rope_patch import evaluation
from rope_patch.evaluation import (
    Ranking,
    RunStatistics,
    change_range,
    change_text,
    depth_maps,
    draw_figures,
    draw_heat_maps,
    log_ticks,
)
from rope_patch.statistics import Interval
from rope_patch.utils.figures import BASE_LOOK, PALETTE, line_look

# -- figures ---------------------------------------------------------------------------------------


def ranked(measured):
    stats = RunStatistics(measured)
    return stats, Ranking(stats)


@pytest.fixture(scope="module")
def of_many():
    return {name: picture.svgs for name, picture in draw_figures(*ranked(many())).items()}


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_each_figure_asks_a_question_and_names_every_method(of_many, width):
    questions = [" ".join(texts(svgs[width])) for svgs in of_many.values()]
    assert {"answers", "perplexity", "stretch"} <= of_many.keys()
    assert all("?" in text for text in questions)
    for name, svgs in of_many.items():
        labels = [text.strip() for text in texts(svgs[width])]
        methods = {text for text in labels if text.startswith("method ")}
        assert methods == {f"method {i}" for i in range(14)}, name


def drawn_looks(svg):
    """Return the strokes and the marker's outline of each method's line, by its mark."""
    looks = {}
    for group in ElementTree.fromstring(svg.replace("&nbsp;", " ")).iter("g"):
        markers = [path.get("d") for path in group.findall("defs/path")]
        if group.get("data-method") and markers:
            outline = re.sub(r"\s+", " ", markers[0])
            style = group.find(".//use").get("style")
            fill = re.search(r"fill: ([^;]+)", style)
            if stroke := re.search(r"stroke: ([^;]+)", style):  # else a band
                looks[group.get("data-method")] = stroke[1], outline, fill and fill[1]
    return looks


def test_a_method_has_one_look_in_all_figures_and_no_other_has_it(of_many):
    looks = {name: drawn_looks(svgs["wide"]) for name, svgs in of_many.items()}
    assert {name: len(of) for name, of in looks.items()} == {
        "accuracy": 15,
        "answers": 15,
        "perplexity": 15,
        "stretch": 14,  # the plain model's is 1 everywhere
    }
    for of in looks.values():
        assert of.items() <= looks["perplexity"].items()
    assert len(set(looks["perplexity"].values())) == 15


def test_two_lines_have_a_band(of_many):
    svg = of_many["perplexity"]["wide"]
    bands = set(re.findall(r"fill: var\(--(\w+)\); fill-opacity: 0\.13", svg))
    assert bands == {"m0", "m1"}  # the best method and the plain model


def test_equal_lines_share_their_course_in_stripes(of_many):
    # All methods of the fixture stretch alike, in 16 pairs.
    dashes = re.findall(r"stroke-dasharray: ([\d.]+),([\d.]+)", of_many["stretch"]["wide"])
    shares = [float(on) / (float(on) + float(off)) for on, off in dashes]
    assert sum(share == pytest.approx(1 / 14, rel=1e-3) for share in shares) == 14


def test_twenty_two_methods_have_a_marker_each_and_no_two_a_colour_with_the_same_dashes():
    looks = [line_look(number) for number in range(22)]
    assert len({(look.marker, look.is_hollow) for look in looks}) == 22
    assert len({(look.colour, look.dashes) for look in looks}) == 22
    assert not any(BASE_LOOK.colour == look.colour for look in looks)
    assert not any(BASE_LOOK.marker == look.marker for look in looks)
    assert len({line_look(number) for number in range(308)}) == 308


# Machado, Oliveira & Fernandes 2009, table of severity 1.0: linear RGB as seen without one kind of
# cones.
CONES = {
    "all": numpy.eye(3),
    "no red": numpy.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green": numpy.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no blue": numpy.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def linear(colour):
    """Return a colour's linear sRGB (IEC 61966-2-1)."""
    values = numpy.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return numpy.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Return CIELAB of linear sRGB, under D65."""
    rows = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = numpy.array(rows) @ numpy.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = numpy.where(xyz > 216 / 24389, numpy.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return numpy.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("cones", CONES)
def test_colours_of_lines_are_told_apart(mode, cones):
    names = {line_look(number).colour for number in range(22)} | {BASE_LOOK.colour}
    seen = {name: lab(CONES[cones] @ linear(PALETTE[name][mode])) for name in names}
    distances = {
        (a, b): float(numpy.linalg.norm(seen[a] - seen[b]))
        for a, b in itertools.combinations(sorted(names), 2)
    }
    assert len(names) == 8
    assert min(distances.values()) > 12, min(distances, key=distances.get)  # 2.3 is just noticed


@pytest.mark.parametrize("mode", [0, 1])
def test_lines_stand_out_from_the_page(mode):
    luminance = [0.2126, 0.7152, 0.0722]
    paper = linear(PALETTE["paper"][mode]) @ luminance
    for number in range(22):
        line = linear(PALETTE[line_look(number).colour][mode]) @ luminance
        low, high = sorted((line, paper))
        assert (high + 0.05) / (low + 0.05) >= 3  # WCAG 2.2, 1.4.11: graphical objects


def with_answers_alone():
    """Return an evaluation of one task under two methods."""
    task = retrieval("rp_niah_multikey_1_ll", ("none", "yarn ×2"), count=6)
    methods = [{"label": "none", "method": None}, {"label": "yarn ×2", "method": "yarn"}]
    return results() | {"perplexity": None, "retrieval": [task], "methods": methods}


@pytest.mark.parametrize("trained", [1024, 8192, 65536])
def test_the_trained_length_is_marked_among_answers_wherever_it_is(trained):
    measured = with_answers_alone()
    measured["run"]["trained_length"] = trained
    for svg in draw_figures(*ranked(measured))["answers"].svgs.values():
        assert f"trained on {trained:,}" in texts(svg)


def drawn_values(axes):
    """Return the values of everything that is drawn along y, and the ends and ticks of the axis."""
    lines = [list(line.get_ydata()) for line in axes.lines]
    values = [y for line in lines if line != [0, 1] for y in line]  # but the trained length's
    for drawn in axes.collections:  # bands and whiskers
        values += [y for path in drawn.get_paths() for y in path.vertices[:, 1]]
    low, high = axes.get_ylim()
    return values, low, [tick for tick in axes.get_yticks() if low <= tick <= high]


@pytest.mark.usefixtures("undrawn")
def test_no_figure_reaches_where_its_quantity_cannot(monkeypatch):
    measured = with_answers_alone()
    for label, rows in measured["retrieval"][0]["samples"].items():
        for sample in rows:  # of two texts, nearly certain: Student's t reaches below 0
            sample |= {"text": sample["text"] % 2, "score": float(label == "none")}
            sample["log_likelihood"] = -0.01 - 0.3 * sample["text"]
    rng = random.Random(0)
    nats = {label: [[rng.uniform(0, 0.02) for _ in range(128)]] * 2 for label in LABELS[:2]}
    sliding = {"stride": 256, "lengths": [2048, 8192]}
    sliding["losses"] = {label: {"2048": [[0.0]], "8192": [[0.01, 0.0]]} for label in LABELS[:2]}
    measured["perplexity"] = perplexity(LABELS[:2]) | {"losses": nats, "sliding": sliding}
    stats, ranking = ranked(measured)

    axes = {}
    save = Figure.savefig

    def note(figure, file, **options):
        axes.setdefault(figure.axes[0].get_ylabel(), []).append(figure.axes[0])
        save(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    draw_figures(stats, ranking)
    ends = {
        "nats a token": (0, math.inf),
        "accuracy, mean of tasks": (0, 1),
        "perplexity": (1, math.inf),
    }
    assert ends.keys() <= axes.keys()
    for quantity, (least, most) in ends.items():
        for drawn in axes[quantity]:
            values, low, ticks = drawn_values(drawn)
            assert values
            outside = [v for v in (*values, *ticks) if not least <= v <= most]
            assert outside == [], quantity
            assert low >= least - 0.03, quantity  # the margin of a share


@pytest.mark.usefixtures("undrawn")
def test_captions_name_the_interval_and_whose_it_is():
    few = draw_figures(*ranked(results()))
    assert few["answers"].caption == (
        "Whiskers are 95% Student's t intervals of the mean over texts."
    )
    assert "Wilson" in few["accuracy"].caption
    assert "bootstrap" in few["sliding"].caption
    assert few["stretch"].caption == ""  # computed, not measured
    several = draw_figures(*ranked(many()))["answers"].caption
    assert several.endswith("of method 0 and the plain model; the table has the others'.")
    single = with_answers_alone()
    for rows in single["retrieval"][0]["samples"].values():
        for sample in rows:
            sample["text"] = 0
    assert draw_figures(*ranked(single))["answers"].caption.startswith("No interval")


def test_every_y_axis_has_three_labels_at_least():
    rng = random.Random(0)
    for _ in range(300):
        low = 10 ** rng.uniform(-1, 4)
        high = low * 10 ** rng.uniform(0.7, 4)
        ticks = log_ticks(low, high)
        assert 3 <= len(ticks) <= 10
        assert all(low <= tick <= high for tick in ticks)


@pytest.mark.usefixtures("undrawn")
def test_accuracy_that_is_the_same_everywhere_is_no_figure():
    measured = results() | {"perplexity": None}
    assert "accuracy" in draw_figures(*ranked(measured))
    for task in measured["retrieval"]:
        for rows in task["samples"].values():
            for sample in rows:
                sample["score"] = 0.0
    assert "accuracy" not in draw_figures(*ranked(measured))


@pytest.mark.usefixtures("undrawn")
def test_a_heat_map_needs_something_to_show():
    measured = results()
    task = measured["retrieval"][0]
    for sample in task["samples"]["none"]:
        sample["score"] = 0.0
    tables, (line,) = depth_maps(*ranked(measured), task["task"])
    assert [table.name for table in tables] == ["yarn ×2", "linear ×2"]
    assert "plain model" in line
    for rows in task["samples"].values():
        for sample in rows:
            sample["score"] = 1.0
    assert depth_maps(*ranked(measured), task["task"]) == ([], [])
    assert f"retrieval-{task['task']}" not in draw_heat_maps(*ranked(measured))


# -- numbers ---------------------------------------------------------------------------------------


def interval(estimate, low, high):
    return Interval(estimate, low, high, 10, 10)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.028, 1.005, 1.051), "+2.8% (+0.5 to +5.1%)"),
        ((0.97, 0.9, 1.0), "−3.0% (−10.0 to ±0.0%)"),
        ((1.788, 1.438, 2.224), "+78.8% (+43.8 to +122.4%)"),
        ((1.485, 0.01, 150.0), "×1.5 (×0.01 to 150)"),
        ((2.15, 1.85, 3.5), "×2.1 (×1.9 to 3.5)"),
        ((10.0, 8.5, 11.7), "×10 (×8.5 to 12)"),
    ],
)
def test_a_ratio_and_its_interval_have_one_unit(values, text):
    ratio = interval(*values)
    assert f"{change_text(ratio)} ({change_range(ratio)})" == text


def test_a_column_may_choose_the_unit():
    ratio = interval(1.028, 1.005, 1.051)
    assert change_text(ratio, percent=False, unit=False) == "1.028"
    assert change_range(ratio, percent=False, unit=False) == "1.005 to 1.051"


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("change_range", (1.2, 0, math.inf), ""),
        ("perplexity_range", (12.0, 0, math.inf), ""),
        ("nats_range", (0.9, -math.inf, math.inf), ""),
        ("percent_range", (0.5, 0.34, 0.66), "34 to 66%"),
        ("nats_range", (0.61, 0.07, 1.15), "0.07 to 1.15"),
        ("nats_range", (0.55, -0.03, 1.12), "−0.03 to 1.12"),
    ],
)
def test_intervals_have_one_notation_and_none_if_nothing_is_known(kind, values, text):
    assert getattr(evaluation, kind)(interval(*values)) == text


def test_no_interval_of_few_leaves_what_is_possible():
    """Student's interval of two blocks, or of few texts, reaches below 0 nats."""
    measured = many()
    for label in measured["perplexity"]["losses"]:
        measured["perplexity"]["losses"][label] = [[0.2] * 64 + [0.0, 0.9]]
    stats = RunStatistics(measured)
    half = 12.7062 * 0.45  # Student's t of one degree of freedom, times the standard error
    perplexity = stats.average("none", beyond=True)
    assert perplexity.low == 1.0
    assert perplexity.high == pytest.approx(math.exp(0.45 + half), rel=1e-3)
    losses = [stats.answer_loss(label, 8192).mean for label in stats.labels]
    assert min(loss.low for loss in losses) == 0.0
    shares = [stats.accuracy(label, lengths=(8192,)) for label in stats.labels]
    assert all(0 <= share.low <= share.estimate <= share.high <= 1 for share in shares)
