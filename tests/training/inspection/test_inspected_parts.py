"""Test what an inspection counts: duplicates by all shingles, histograms, rows written out."""

import itertools
import random
import re
import sys

import pytest
from packed_rows import LENGTH, SETTINGS, make_rows

from rope_patch.tasks import read_text
from rope_patch.training import (
    DataArguments,
    DuplicateFinder,
    format_bins,
    length_bins,
    make_length_figure,
    packing_yield,
    write_length_plot,
)

pytest.importorskip("datasketch")


def brute_force_shingles(text):
    """Return each five words in a row, of words without punctuation."""
    words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def jaccard(one, two):
    common = len(one & two)
    return common / (len(one) + len(two) - common)


def edited(text, rng, share):
    """Replace a share of a text's words."""
    words = text.split()
    for index in rng.sample(range(len(words)), round(share * len(words))):
        words[index] = f"word{rng.randrange(10**6)}"
    return " ".join(words)


def plain_text(name):
    """Return a novel without what makes the two ways to find words differ."""
    text = read_text(name)
    return " ".join("".join(c if c.isalnum() and c.isascii() else " " for c in text).split())


@pytest.fixture(scope="module")
def planted():
    """Return different documents, and edited copies of them from exact to far."""
    rng, words = random.Random(0), plain_text("emma").split()
    originals = [" ".join(words[i * 600 : i * 600 + rng.randrange(200, 600)]) for i in range(60)]
    copies = [
        (edited(original, rng, share), share)
        for original in originals
        for share in (0.0, 0.01, rng.uniform(0, 0.08))
    ]
    rng.shuffle(copies)
    return originals, copies


def test_planted_duplicates_are_found_and_others_are_not(planted):
    originals, copies = planted
    finder = DuplicateFinder()
    kept, kept_shingles = {}, {}
    for index, text in enumerate(originals):
        assert finder.check(text, f"original {index}") is None
        kept[f"original {index}"] = text
        kept_shingles[f"original {index}"] = brute_force_shingles(text)
    kinds = {"exact": 0, "near": 0, "none": 0}
    errors = []
    for index, (text, _) in enumerate(copies):
        location = f"copy {index}"
        own = brute_force_shingles(text)
        similarities = {name: jaccard(own, other) for name, other in kept_shingles.items()}
        nearest = max(similarities, key=similarities.get)
        duplicate = finder.check(text, location)
        if text in kept.values():  # all words are plain, with single spaces
            assert duplicate.is_exact
            assert kept[duplicate.original] == text
            kinds["exact"] += 1
        elif duplicate is not None:
            kinds["near"] += 1
            assert not duplicate.is_exact
            assert duplicate.original == nearest
            assert similarities[nearest] > 0.7
            errors.append(duplicate.similarity - similarities[nearest])
        else:
            kinds["none"] += 1
            assert similarities[nearest] < 0.9
            kept[location], kept_shingles[location] = text, own
    assert min(kinds.values()) > 20
    assert abs(sum(errors) / len(errors)) < 0.03  # those just below the threshold are not in it
    assert max(map(abs, errors)) < 0.13


def test_normalisation_makes_duplicates_exact():
    finder = DuplicateFinder()
    assert finder.check("Ｅmma  Woodhouse,\nhandsome, clever, and rich", "a:1") is None
    duplicate = finder.check("emma woodhouse, HANDSOME, clever,  and rich ", "b:7")
    assert duplicate == ("b:7", "a:1", 1.0, True)
    near = finder.check("Emma Woodhouse handsome clever and rich!", "c:1")
    assert (near.original, near.similarity, near.is_exact) == ("a:1", 1.0, False)
    assert finder.check("emma woodhouse, handsome", "d:1") is None


def test_a_duplicate_of_a_duplicate_names_the_original():
    finder, text = DuplicateFinder(), plain_text("persuasion")[:4000]
    assert finder.check(text, "first") is None
    near = finder.check(text + " the end", "second")
    again = finder.check(text + " the end", "third")
    assert (near.original, again.original) == ("first", "first")


def test_scripts_without_spaces_are_compared_by_letters():
    finder = DuplicateFinder()
    rng = random.Random(0)
    letters = [chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(400)]
    assert finder.check("".join(letters), "first") is None
    letters[200] = "x"
    assert finder.check("".join(letters), "second").similarity > 0.9
    assert finder.check("".join(reversed(letters)), "third") is None


@pytest.mark.parametrize("text", ["", " \n", "?!", "\ud800"])
def test_texts_without_words_are_compared_exactly(text):
    finder = DuplicateFinder()
    assert finder.check(text, "first") is None
    assert finder.check("other words", "second") is None
    assert finder.check(text, "third") == ("third", "first", 1.0, True)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ValueError, match=r"datasketch is not .*pip install '\.\[train\]'"):
        DuplicateFinder()


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
    upper, lower = make_length_figure(sources, MARKS).axes
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
    upper, _ = make_length_figure(sources, MARKS).axes
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
        write_length_plot({"a.jsonl": random_lengths(4)}, MARKS, tmp_path / folder / name)
    one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert one == two


def test_what_is_no_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a picture is an \.svg or a \.png file, got .*a\.pdf"):
        write_length_plot({"a": [1]}, MARKS, tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"there is no folder .*none"):
        write_length_plot({"a": [1]}, MARKS, tmp_path / "none" / "a.png")


LENGTHS = [random.Random(0).choice([3, 20, 47, 48, 49, 96, 130, 300]) for _ in range(80)]


def yield_of(tokenizer, lengths, *, short=False, is_kept=None, **arguments):
    arguments = DataArguments(data=["elsewhere.jsonl"], **arguments)
    is_kept = is_kept or [True] * len(lengths)
    return packing_yield(arguments, tokenizer, lengths, is_kept, short=short, **SETTINGS)


@pytest.mark.parametrize("minimum", [0, 100])
@pytest.mark.parametrize("window", [0, 7])
def test_single(tokenizer, window, minimum):
    result = yield_of(tokenizer, LENGTHS, shuffle_window=window, min_document_length=minimum)
    used = [n for n in LENGTHS if n >= max(LENGTH, minimum)]
    assert result.rows == sum(n // LENGTH for n in used)
    assert result.tokens == result.rows * LENGTH
    assert result.whole == sum(n == LENGTH for n in used)
    assert result.cut == sum(n > LENGTH for n in used)
    assert result.left_out == len(LENGTHS) - len(used)
    assert result.left_out_tokens == sum(LENGTHS) - result.tokens
    assert result.padding == 0


@pytest.mark.parametrize("packing", ["concatenate", "masked"])
def test_one_after_another(tokenizer, packing):
    result = yield_of(tokenizer, LENGTHS, packing=packing)
    ends = list(itertools.accumulate(LENGTHS))
    rows = ends[-1] // LENGTH
    spans = [(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)]
    placed = [(start, end) for start, end in spans if start < rows * LENGTH]
    whole = [s for s in placed if s[0] // LENGTH == (s[1] - 1) // LENGTH]
    assert (result.rows, result.whole, result.cut) == (rows, len(whole), len(placed) - len(whole))
    assert (result.left_out, result.left_out_tokens) == (0, 0)
    assert (result.tokens, result.padding) == (rows * LENGTH, 0)


def test_short_rows(tokenizer):
    result = yield_of(tokenizer, LENGTHS, short=True, short_share=0.2, short_length=25)
    pieces, taken = [], 0
    for document, length in enumerate(LENGTHS):
        left = length
        while left:
            size = min(left, 25, LENGTH - taken % LENGTH)
            pieces.append((document, size, taken // LENGTH))
            taken, left = taken + size, left - size
    rows = taken // LENGTH
    placed = {document for document, _, row in pieces if row < rows}
    whole = {d for d, size, row in pieces if row < rows and size == LENGTHS[d]}
    assert (result.rows, result.whole, result.cut) == (rows, len(whole), len(placed - whole))


def test_equal_to_the_rows_of_a_run(tokenizer, source):
    path, _ = source("a.jsonl", LENGTHS)
    for packing in ("single", "concatenate", "masked"):
        result = yield_of(tokenizer, LENGTHS, packing=packing, shuffle_window=5)
        rows = make_rows(tokenizer, result.rows + 1, [path], packing=packing, shuffle_window=5)
        epochs = [row["row"]["counts"][path]["epochs"] for row in rows]
        assert epochs == [0] * result.rows + [1]


def test_documents_that_are_too_short_give_no_row(tokenizer):
    result = yield_of(tokenizer, [5, 0, 47])
    assert (result.rows, result.whole, result.cut, result.left_out) == (0, 0, 0, 3)
    assert result.left_out_tokens == 52


@pytest.mark.parametrize(
    ("packing", "window"), [("best_fit", 1), ("best_fit", 400), ("best_fit_unmasked", 5)]
)
def test_best_fit(tokenizer, source, packing, window):
    """One pass has its share of what the windows of a long run have."""
    lengths = [n + 1 for n in LENGTHS]
    result = yield_of(tokenizer, lengths, packing=packing, packing_window=window)
    assert (result.left_out, result.left_out_tokens) == (0, 0)
    assert result.whole + result.cut == pytest.approx(len(lengths), abs=1)
    assert result.cut == sum(n > LENGTH for n in lengths)
    assert result.tokens + result.padding == pytest.approx(result.rows * LENGTH, abs=LENGTH)
    assert result.tokens == pytest.approx(sum(lengths), rel=0.1)
    path, _ = source("a.jsonl", lengths)
    options = {"packing": packing, "packing_window": window}
    *_, last = make_rows(tokenizer, 5 * result.rows, [path], **options)
    counts = last["row"]["state"]["row_yield"]
    padding = counts["padding"] / (counts["padding"] + counts["tokens"])
    assert result.padding / (result.rows * LENGTH) == pytest.approx(padding, abs=0.02)


def test_best_fit_leaves_short_documents_out(tokenizer):
    result = yield_of(tokenizer, [5, 30, 40, 7], packing="best_fit", min_document_length=10)
    assert (result.left_out, result.left_out_tokens, result.whole, result.cut) == (2, 12, 2, 0)
    assert (result.rows, result.padding) == (2, 2 * LENGTH - 70)


@pytest.mark.parametrize("packing", ["single", "concatenate", "best_fit"])
def test_filtered_documents_are_not_packed(tokenizer, packing):
    lengths, is_kept = [100, 20, 150, 90, 20], [True, True, False, True, False]
    result = yield_of(
        tokenizer, lengths, is_kept=is_kept, packing=packing, min_document_length=30,
        packing_window=1,
    )  # fmt: skip
    plain = yield_of(
        tokenizer, [100, 90], packing=packing, min_document_length=30, packing_window=1
    )
    assert (result.left_out, result.filtered) == (2, 1)
    assert (result.rows, result.whole, result.cut) == (plain.rows, plain.whole, plain.cut)
    assert result.left_out_tokens == plain.left_out_tokens + 40
    none = yield_of(tokenizer, [100], is_kept=[False], packing=packing)
    assert (none.rows, none.filtered) == (0, 1)
    short = yield_of(tokenizer, lengths, is_kept=is_kept, packing=packing, short=True)
    assert (short.filtered, short.rows) == (0, sum(lengths) // LENGTH)
