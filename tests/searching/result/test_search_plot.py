"""Test the picture of a search: its words, lines, colours and file formats."""

import math
import re
import struct
from itertools import pairwise

import pytest
from search_results import entry, history, make_result

from rope_patch.searching.candidates import Candidate
from rope_patch.searching.result.plot import best_of, draw
from rope_patch.utils.plot_style import PALETTE

pytest.importorskip("matplotlib")

TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")
SPACE = make_result().space


def draw_and_read_text(path, *arguments, **options):
    draw(path, SPACE, *arguments, **options)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no partial file
    return " ".join(TEXT.findall(path.read_text()))


def test_the_picture_of_a_result_has_these_words(tmp_path):
    make_result().plot(tmp_path / "a.svg")
    text = " ".join(TEXT.findall((tmp_path / "a.svg").read_text()))
    assert "tiny: found by curve, at 1,024 tokens (×4)" in text
    assert "found (curve), attention factor 1.25" in text
    for name in ("PI", "NTK", "YaRN", "measured whole", "stopped early", "best so far"):
        assert f" {name}" in text
    assert "worse, or failed" in text
    assert "critical dimension: pair 7" in text  # of 256 tokens: 2 pi 10000^(7/16) > 256
    assert "fitness (nats)" in text


def heights(svg, colour):
    """Return the y coordinates of the first line of a colour."""
    path = next(
        line for line in svg.split("<path") if f"stroke: {colour}" in line and "clip-path" in line
    )
    return [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.split('"')[1])]


def test_the_lines_are_the_stretches(tmp_path):
    """The found one's heights are its stretches' logarithms; NTK's are a straight line."""
    make_result().plot(tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    ntk = heights(svg, PALETTE["m2"][0])
    steps = [b - a for a, b in pairwise(ntk)]
    assert len(ntk) == 16
    assert all(step == pytest.approx(steps[0], abs=1e-3) for step in steps)
    per_log2 = (ntk[0] - ntk[-1]) / math.log2(4)  # NTK's last pair is stretched by the factor
    ours = heights(svg, PALETTE["m0"][0])
    rise = [(ours[0] - y) / per_log2 for y in ours]
    assert rise == pytest.approx([math.log2(s) for s in make_result().long_factor], abs=1e-3)


def test_a_search_without_measurements_has_no_empty_panel(tmp_path):
    text = draw_and_read_text(tmp_path / "a.svg")
    assert "1,024 tokens (×4)" in text
    assert "YaRN" in text
    assert "found" not in text
    assert "evaluation" not in text


@pytest.mark.parametrize(
    "short",
    [
        [entry(1, 0.9, 0.9, "yarn")],
        [entry(1, math.inf, math.inf, "yarn")],
        [entry(1, 3.0, math.inf, "linear", complete=False)],
        [entry(1, 0.9, 0.9, "yarn"), entry(2, 0.9, 0.9, "ntk")],
        [entry(1, 0.0, 0.0, "yarn")],
    ],
    ids=["one", "failed", "stopped", "equal", "nothing left to gain"],
)
def test_short_histories_are_drawn(tmp_path, short):
    text = draw_and_read_text(tmp_path / "a.svg", short)
    assert "the search, smaller is better" in text
    ticks = [w for w in text.split("pair, from the fastest")[1].split() if w.lstrip("−").isdigit()]
    assert ticks  # evaluations are whole numbers
    assert "−" not in text.split("evaluation")[0].rsplit("best", 1)[-1]


def test_the_best_so_far_is_the_best_complete_candidate():
    assert best_of([]) is None
    assert best_of(history()[1:3]) is None  # one failed, one stopped early
    assert best_of(history()[:3]) == Candidate("yarn", "yarn", {})
    assert best_of(history()).method == "longrope"
    stopped = entry(5, 0.1, 0.4, complete=False, long_factor=[2.0] * 16)
    assert best_of([*history(), stopped]) == best_of(history())


def test_endless_stretches_do_not_widen_the_axis(tmp_path):
    candidate = Candidate("curve", "longrope", {"long_factor": [1.0] * 15 + [1e18]})
    text = draw_and_read_text(tmp_path / "a.svg", candidate=candidate)
    assert "×32" in text  # eight times the factor
    assert "×64" not in text


def test_dark_mode_has_other_colours(tmp_path):
    make_result().plot(tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    used = set(re.findall(r"#[0-9a-f]{6}", svg.split("</style>", 2)[-1]))
    light = {pair[0] for pair in PALETTE.values()}
    assert used <= light  # so that every colour has a rule
    rules = svg.split("prefers-color-scheme:dark")[1]
    for one, other in PALETTE.values():
        assert f'[style*="stroke: {one}"]{{stroke:{other}!important}}' in rules
        assert f'[style*="fill: {one}"]{{fill:{other}!important}}' in rules


def test_the_same_search_makes_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        make_result().plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_bitmap_is_large_enough_to_print(tmp_path):
    make_result().plot(tmp_path / "a.PNG")
    data = (tmp_path / "a.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1800
    assert height >= 1500


def test_a_failed_drawing_keeps_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    draw(path, SPACE, history())
    before = path.read_bytes()
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draw(path, SPACE, history()[:1])
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["a.pdf", "a", "svg"])
def test_other_file_formats_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"an \.svg or a \.png file"):
        draw(tmp_path / name, SPACE)
    assert not list(tmp_path.iterdir())


def test_the_figure_has_the_panels_of_the_picture():
    result = make_result()
    figure = result.figure()
    assert len(figure.axes) == (2 if result.history else 1)
    assert str(result).splitlines()[0] in result._repr_html_()
