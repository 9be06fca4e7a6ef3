"""Test the samples of all retrieval tasks: lengths, depths, shared texts and seeds."""

import random

import pytest
from helpers.tokenizers import TINY, load

from rope_patch import tasks
from rope_patch.tasks import samples


class Letters:
    """A tokenizer with one token per character that records its texts."""

    def __init__(self):
        self.texts = []

    def __call__(self, text, add_special_tokens=True, verbose=True):
        self.texts.append(text)
        return type("Encoding", (), {"input_ids": [*text]})


def drafts(unit, head="Q", prefix="A"):
    """Return a draft function of samples: a unique key, then `unit(0)`, `unit(1)`, ..."""

    def draw(text):
        keys = [str(text.rng.randint(10, 99)) for _ in text.depths]
        return [
            samples.SampleDraft(
                prompt=lambda n, k=key: head + k + "".join(unit(i) for i in range(n)),
                prefix=prefix,
                answers=[key],
                target=key,
                depth=depth,
            )
            for key, depth in zip(keys, text.depths, strict=True)
        ]

    return draw


def build(draw, tokenizer=None, room=5, **kwargs):
    built = samples.build(draw, "toy", room, tokenizer=tokenizer or Letters(), **kwargs)
    return built["test"].to_list()


UNITS = {
    "one token": lambda i: "x",
    "three tokens": lambda i: "xyz",
    "longer than the length": lambda i: "x" * 5000,
    "ever longer": lambda i: "x" * (1 + i),
    "ever shorter": lambda i: "x" * max(1, 200 - i),
    "very uneven": lambda i: "x" * (400 if i % 7 == 3 else 1),
    "short, then long": lambda i: "x" * (1 if i < 300 else 90),
    "long, then short": lambda i: "x" * (90 if i < 20 else 1),
    "of any size": lambda i: "x" * random.Random(i).randint(1, 60),
}


@pytest.mark.parametrize("length", [10, 11, 12, 777, 2048])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_a_sample_has_as_many_units_as_fit(unit, length):
    """The reference tries every number of units."""
    (row,) = build(drafts(unit), length=length, samples=1)
    sizes = [5 + len("Q12 A")]
    while sizes[-1] <= length:
        sizes.append(sizes[-1] + len(unit(len(sizes) - 1)))
    assert row["tokens"] == sizes[-2]
    assert len(f"{row['input']} {row['gen_prefix']}") + 5 == row["tokens"]


@pytest.mark.parametrize("length", [4096, 32768])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_the_number_of_units_is_found_in_few_guesses(unit, length):
    tokenizer = Letters()
    build(drafts(unit), tokenizer, length=length, samples=1)
    # Even units need five or six guesses; a bisection starts after a dozen.
    even = unit in (UNITS["one token"], UNITS["three tokens"])
    assert len(tokenizer.texts) <= (8 if even else 12 + 17 + 3)


def test_a_length_that_is_too_short_is_refused():
    build(drafts(UNITS["one token"]), length=10, samples=1)
    with pytest.raises(ValueError, match=r"9 tokens is too short for toy: .* take 10"):
        build(drafts(UNITS["one token"]), length=9, samples=1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"depths": (50, 101)}, "percentages from 0 to 100"),
        ({"depths": (-1,)}, "percentages from 0 to 100"),
        ({"depths": ()}, "at least one depth"),
        ({"per_text": 0}, "at least 1 sample"),
    ],
)
def test_impossible_samples_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(drafts(UNITS["one token"]), **kwargs)


def test_samples_cycle_through_depths_and_share_texts():
    built = build(drafts(UNITS["one token"]), length=99, depths=(0, 50, 100), samples=8, per_text=2)
    assert [row["depth"] for row in built] == [0, 50, 100, 0, 50, 100, 0, 50]
    assert [row["text"] for row in built] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({row["id"] for row in built}) == 8
    assert len(build(drafts(UNITS["one token"]), length=99, depths=(0, 50))) == 2


def test_samples_of_one_text_have_the_filler_of_the_longest():
    def draw(text):
        return [
            samples.SampleDraft(
                prompt=lambda n, q=q: q + "x" * n, prefix="A", answers=[q], target=q
            )
            for q in ("short", "the longest question", "a longer one")
        ]

    built = build(draw, length=200, samples=3, per_text=3)
    assert {row["input"].count("x") - row["answers"][0].count("x") for row in built} == {
        built[1]["input"].count("x")
    }
    assert [row["tokens"] for row in built] == [185, 200, 192]
    assert {row["depth"] for row in built} == {None}


def test_a_draft_function_gets_length_depths_texts_and_options():
    contexts = []

    def draw(text):
        contexts.append(text)
        return drafts(UNITS["one token"])(text)

    build(
        draw, length=100, samples=3, depths=(5, 6), per_text=3, planted=False, hops=4, text="emma"
    )
    (text,) = contexts
    assert (text.length, text.depths, text.planted) == (100, [5, 6, 5], False)
    assert (text.texts, text.options) == (("emma",), {"hops": 4})
    build(draw, length=100, samples=1)
    novels = sorted(tasks.FOLDER.parent.glob("data/*.txt.xz"))
    assert contexts[-1].texts == tuple(path.name.split(".")[0] for path in novels)


def test_words_start_anywhere_and_wrap_around(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("one two\nthree  four")
    text = samples.TextContext(
        rng=random.Random(0), length=9, depths=[0], planted=True, texts=(str(file),), options={}
    )
    circle = ["one", "two", "three", "four"]
    starts = set()
    for _ in range(30):
        words = text.word_source()
        excerpt = words(11)
        start = circle.index(excerpt[0])
        starts.add(start)
        assert excerpt == [circle[(start + i) % 4] for i in range(11)]
        assert words(2) == excerpt[:2]
        assert words(0) == []
    assert starts == {0, 1, 2, 3}


def test_the_tokenizer_may_be_an_object_or_a_name():
    by_object = build(drafts(UNITS["one token"]), load("tiny"), length=200)
    draw = drafts(UNITS["one token"])
    for names in ({"tokenizer": str(TINY)}, {"pretrained": str(TINY)}):
        assert samples.build(draw, "toy", 5, length=200, **names)["test"].to_list() == by_object
