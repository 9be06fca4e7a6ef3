"""Test duplicates against Jaccard similarities that are computed from all shingles."""

import random
import sys

import pytest

from rope_patch.tasks import texts
from rope_patch.training.inspection.duplicates import DuplicateFinder

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
    text = texts.read_text(name)
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
    with pytest.raises(ValueError, match=r"datasketch is not .*pip install 'rope-patch\[train\]'"):
        DuplicateFinder()
