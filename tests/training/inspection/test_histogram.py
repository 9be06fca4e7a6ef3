"""Test that a histogram of lengths counts what there is."""

import itertools
import random
import re

import pytest

from rope_patch.training.inspection.histogram import (
    format_bins,
    length_bins,
    make_figure,
    write_plot,
)

MARKS = {"trained": 2048, "target": 8192}


def random_lengths(seed, count=500):
    rng = random.Random(seed)
    return [int(2 ** rng.uniform(0, 15)) for _ in range(count)] + [0, 1, 2, 2047, 2048, 8192]


def test_bins_count_documents_and_tokens():
    lengths = random_lengths(0)
    bins = length_bins(lengths)
    assert sum(each.documents for each in bins) == len(lengths)
    for each in bins:
        inside = [n for n in lengths if each.shortest <= n <= each.longest]
        assert (each.documents, each.tokens) == (len(inside), sum(inside))
    for one, two in itertools.pairwise(bins):
        assert two.shortest == one.longest + 1
    assert length_bins([]) == []
    assert length_bins([0, 0]) == [(0, 0, 2, 0)]
    assert [each.documents for each in length_bins([5, 70])] == [1, 0, 0, 0, 1]


def test_the_table_has_every_bin_and_marks_the_lengths():
    lengths = random_lengths(1)
    header, *lines = format_bins(length_bins(lengths), MARKS)
    assert header.split() == ["length", "in", "tokens", "documents", "of", "all", "tokens"]
    for line in lines:
        shortest, longest, documents, share = re.match(
            r" *([\d,]+) – +([\d,]+) +([\d,]+) +([\d.]+)%", line
        ).groups()
        low, high = (int(text.replace(",", "")) for text in (shortest, longest))
        inside = [n for n in lengths if low <= n <= high]
        assert int(documents.replace(",", "")) == len(inside)
        assert float(share) == pytest.approx(100 * sum(inside) / sum(lengths), abs=0.051)
        for name, length in MARKS.items():
            assert (f"{name} {length:,}" in line) == (low <= length <= high)
    assert max(line.count("#") for line in lines) == 30


def test_lengths_beyond_all_documents_are_marked_on_lines_of_their_own():
    lines = format_bins(length_bins([300, 400]), {"trained": 100, "target": 8192})
    assert [line.partition("<- ")[2] for line in lines] == ["", "trained 100", "", "target 8,192"]


def heights(axes):
    """Return the heights of each source's bars, by the bars' left and right edges."""
    return [
        {(bar.get_x(), bar.get_x() + bar.get_width()): bar.get_height() for bar in container}
        for container in axes.containers
    ]


def test_the_picture_shows_the_true_counts():
    pytest.importorskip("matplotlib")
    sources = {"a.jsonl": random_lengths(2), "_b.jsonl": random_lengths(3, 200)}
    upper, lower = make_figure(sources, MARKS).axes
    total = sum(map(sum, sources.values()))
    for lengths, documents, tokens in zip(
        sources.values(), heights(upper), heights(lower), strict=True
    ):
        assert sum(documents.values()) == sum(n > 0 for n in lengths)
        assert sum(tokens.values()) == pytest.approx(100 * sum(lengths) / total)
        for (left, right), height in documents.items():
            assert height == sum(left <= n < right for n in lengths)
    marks = [line.get_xdata()[0] for line in upper.lines]
    assert marks == list(MARKS.values())
    assert [text.get_text().strip() for text in upper.get_legend().get_texts()] == list(sources)


def test_many_sources_are_one_beyond_the_colours():
    pytest.importorskip("matplotlib")
    sources = {f"{'x' * 40}/{n}.jsonl": [n + 1] * (n + 1) for n in range(10)}
    upper, _ = make_figure(sources, MARKS).axes
    names = [text.get_text().strip() for text in upper.get_legend().get_texts()]
    assert names[0].startswith("…")
    assert names[0].endswith("/0.jsonl")
    assert names[-1] == "the other sources"
    assert sum(sum(each.values()) for each in heights(upper)) == 55
    assert sum(heights(upper)[-1].values()) == 8 + 9 + 10


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_the_same_lengths_make_the_same_file(tmp_path, name):
    pytest.importorskip("matplotlib")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_plot({"a.jsonl": random_lengths(4)}, MARKS, tmp_path / folder / name)
    one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert one == two


def test_what_is_no_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a picture is an \.svg or a \.png file, got .*a\.pdf"):
        write_plot({"a": [1]}, MARKS, tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"there is no folder .*none"):
        write_plot({"a": [1]}, MARKS, tmp_path / "none" / "a.png")
