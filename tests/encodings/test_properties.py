"""Test properties of encodings against what can be worked out by hand."""

import math
from dataclasses import replace

import properties_page
import pytest
import torch
from encoding_properties import PROPERTIES, property_table
from encoding_subjects import SUBJECTS, Bias, Content, Setting, Table, make_subject

from rope_patch.encodings import alibi_slopes, dot_products, fire_progress

SETTING = Setting()
CODES = ("integer", "normalised", "binary", "sinusoidal", "learned", "rope", "xpos")
BIASES = ("alibi", "t5", "kerple", "fire", "sandwich")


@pytest.fixture(scope="module")
def table():
    return property_table()


# -- known answers ---------------------------------------------------------------------------------

ANSWERS = {
    "unique": dict.fromkeys(CODES, "yes") | dict.fromkeys(("none", *BIASES), "no code"),
    "bounded": {
        "integer": "no", "normalised": "no", "binary": "yes", "sinusoidal": "yes",
        "learned": "yes", "rope": "yes", "xpos": "no", "alibi": "no", "t5": "yes", "kerple": "no",
        "fire": "yes", "sandwich": "yes",
    },
    "relative": {
        "integer": "no", "normalised": "no", "binary": "no", "sinusoidal": "no", "learned": "no",
        "rope": "yes", "xpos": "yes", "alibi": "yes", "t5": "yes", "kerple": "yes",
        "fire": "partly", "sandwich": "yes",
    },
    "decaying": {
        "integer": "no", "normalised": "no", "learned": "no", "sinusoidal": "partly",
        "rope": "partly", "xpos": "partly", "alibi": "yes", "kerple": "yes", "sandwich": "partly",
    },
    "translation-invariant": {
        "integer": "no", "normalised": "no", "binary": "no", "learned": "no", "sinusoidal": "yes",
        "rope": "yes", "xpos": "yes", "alibi": "yes", "t5": "yes", "kerple": "yes",
        "fire": "partly", "sandwich": "yes",
    },
    "linear in shift": {
        "integer": "no", "normalised": "no", "binary": "no", "learned": "no", "sinusoidal": "yes",
        "rope": "yes", "xpos": "yes", "alibi": "no code", "none": "no code",
    },
    "n-dimensional": dict.fromkeys((*CODES, "t5", "kerple", "fire"), "yes")
    | {"alibi": "no", "sandwich": "no"},
    "extrapolating": {
        "integer": "no", "normalised": "no", "binary": "partly", "sinusoidal": "partly",
        "learned": "no", "rope": "partly", "xpos": "no", "alibi": "partly", "t5": "yes",
        "fire": "yes",
    },
    "periodic": {
        "integer": "no", "normalised": "no", "binary": "yes", "sinusoidal": "no", "rope": "no",
        "learned": "no", "alibi": "no code",
    },
    "content-independent": dict.fromkeys(CODES, "no") | dict.fromkeys(BIASES, "yes"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROPERTIES)
def test_answers(table, name):
    expected = ANSWERS[name]
    assert {encoding: table[encoding][name].answer for encoding in expected} == expected


def test_table_is_whole(table):
    assert set(table) == set(SUBJECTS)
    assert set(ANSWERS) == set(PROPERTIES)
    for row in table.values():
        assert list(row) == list(PROPERTIES)


def test_no_encoding_has_nothing_to_measure(table):
    assert {verdict.answer for verdict in table["none"].values()} == {"nothing", "no code"}


def _turned(length):
    """Return how many of 32 pairs have turned fully, up to a hundredth, at distances below it."""
    frequencies = 10000.0 ** -(torch.arange(32).double() / 32)
    return int(((length - 1) * frequencies >= 0.99 * 2 * math.pi).sum())


BY_HAND = {
    # 512 positions in a row: neighbours are 1 apart, the ends 511.
    ("integer", "unique"): 1 / 511,
    # One bit against all 9.
    ("binary", "unique"): 1 / 3,
    ("integer", "bounded"): 2.0,
    ("alibi", "bounded"): 2.0,
    ("alibi", "decaying"): -(2.0**-8) * (256 + 511) / 2,
    ("rope", "decaying"): float(dot_products(torch.arange(256, 512), 64).mean() / 32),
    ("binary", "extrapolating"): 9 / 12,
    ("rope", "extrapolating"): _turned(512) / 32,
    # exp(-511 m) is within a hundredth of 0 from m = 2 ** -6 on.
    ("alibi", "extrapolating"): 6 / 8,
    ("binary", "periodic"): 0.0,
    ("integer", "periodic"): 1 / (9 * 512 - 1),
    # A row down is a column to the right.
    ("alibi", "n-dimensional"): 0.0,
}


@pytest.mark.parametrize(("encoding", "name"), BY_HAND)
def test_numbers_by_hand(table, encoding, name):
    assert table[encoding][name].number == pytest.approx(BY_HAND[encoding, name], abs=1e-9)


def test_more_numbers_by_hand(table):
    assert table["binary"]["periodic"].condition == "after 4,096 tokens"
    assert table["learned"]["extrapolating"].condition == "ends after 512 rows"
    assert table["xpos"]["bounded"].number == math.inf
    # Of a logarithm, doubling 2 ** 19 adds ln 2 to at most 19 ln 2.
    assert 1 + 1 / 20 < table["kerple"]["bounded"].number < 1 + 1 / 15
    # A factor fitted on half of t, for integers that all grow by 64; t / N only scales them.
    t = torch.arange(448).double()
    factor = float((t @ (t + 64)) / (t @ t))
    error = float((t * factor - t - 64).abs().max() / 511)
    for encoding in ("integer", "normalised"):
        seen = table[encoding]["linear in shift"].number
        assert seen == pytest.approx(error, rel=0.1)
    assert table["integer"]["linear in shift"].number == pytest.approx(seen, rel=1e-9)


def test_rotated_random_vectors_keep_their_size(table):
    for encoding in ("rope", "sinusoidal"):
        condition = table[encoding]["decaying"].condition
        assert condition.startswith("of equal vectors")
        assert float(condition.split()[-1]) == pytest.approx(1, abs=0.05)
    # xPos keeps zeta ** (d / 512) of each pair; of random vectors the squares add up.
    zeta = (torch.arange(32).double() / 32 + 0.4) / 1.4
    sizes = [
        (zeta ** (2 * d / 512)).sum() for d in (torch.ones(1), torch.arange(256, 512)[:, None])
    ]
    expected = math.sqrt(sizes[1] / 256 / sizes[0])
    seen = float(table["xpos"]["decaying"].condition.split()[-1])
    assert seen == pytest.approx(expected, abs=0.03)


# -- the interface ---------------------------------------------------------------------------------

QUERIES = torch.tensor([5, 90, 400])
KEYS = torch.tensor([5, 3, 17])


def turned(vector, position, sign):
    """Turn pairs of neighbours; xPos scales queries by +1 and keys by -1, RoPE by 0."""
    pair = torch.arange(32).double() / 32
    size = ((pair + 0.4) / 1.4) ** (sign * position / 512)
    angle = position * 10000.0**-pair
    return torch.view_as_complex(vector.view(32, 2)) * torch.polar(size, angle)


@pytest.mark.parametrize("encoding", SUBJECTS)
def test_terms_are_the_difference_of_logits(encoding):
    """Compare each term with attention written out for it."""
    subject, content = make_subject(encoding), Content.draw(64, 7)
    x, y = content.query, content.key
    expected = []
    for query, key in zip(QUERIES, KEYS, strict=True):
        if encoding in ("rope", "xpos"):
            q, k = x @ content.query_weight, y @ content.key_weight
            sign = int(encoding == "xpos")
            both = turned(q, query, sign) * turned(k, key, -sign).conj()
            expected.append((both.real.sum() - q @ k)[None])
        elif encoding in CODES:
            p, r = subject.code(query[None])[0], subject.code(key[None])[0]
            middle = content.query_weight @ content.key_weight.T
            expected.append((p @ middle @ y + x @ middle @ r + p @ middle @ r)[None])
        else:
            expected.append(subject.similarity(query[None], key[None])[0])
    got = subject.term(QUERIES, KEYS, content)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_biases_are_those_of_the_functions():
    heads = make_subject("alibi").similarity(QUERIES, KEYS)
    torch.testing.assert_close(heads, -(QUERIES - KEYS)[:, None] * alibi_slopes(8)[None])
    # FIRE's bias is a function of its progress alone, whatever the query.
    fire = make_subject("fire")
    early, late = torch.tensor([[40], [5000]]).long()
    share = fire_progress(late, late - 1000, 0.1, 512)
    near = math.expm1(float(share) * math.log1p(0.1 * 512)) / 0.1
    assert near == pytest.approx(round(near), abs=0.5)
    keys = torch.arange(0, 600)
    steps = fire_progress(torch.full_like(keys, 600), keys, 0.1, 512)
    assert (steps.diff() < 0).all()
    assert not torch.equal(fire.similarity(early, early - 40), fire.similarity(late, late - 40))


# -- encodings made to have a property, or to lack it ----------------------------------------------


def wheel(positions):
    """Return the hands of 32 clocks, which all stand as before after 64 tokens."""
    angles = positions[:, None] * torch.arange(1, 33).double() * 2 * math.pi / 64
    return torch.cat([angles.cos(), angles.sin()], 1)


def test_a_wheel_comes_back():
    subject = Table("wheel", SETTING, wheel)
    verdicts = {name: measure(subject) for name, measure in PROPERTIES.items()}
    assert verdicts["periodic"].answer == "yes"
    assert verdicts["periodic"].condition in {f"after {64 * n:,} tokens" for n in range(1, 65)}
    assert verdicts["unique"].answer == "no"
    assert verdicts["bounded"].answer == "yes"
    assert verdicts["extrapolating"].answer == "yes"
    assert verdicts["linear in shift"].answer == "yes"
    assert verdicts["translation-invariant"].answer == "yes"
    assert verdicts["decaying"].answer == "no"
    assert verdicts["n-dimensional"].answer == "yes"


def bias(function):
    return Bias("mine", SETTING, lambda q, k: function(q, k).double()[:, None])


@pytest.mark.parametrize(
    ("function", "name", "answer"),
    [
        (lambda q, k: k - q, "decaying", "yes"),
        (lambda q, k: (k - q).clamp(min=-100), "decaying", "yes"),
        (lambda q, k: q - k, "decaying", "no"),
        (lambda q, k: (k - q) + 3 * ((q - k) % 2), "decaying", "partly"),
        (lambda q, k: k - q, "relative", "yes"),
        (lambda q, k: k - q + 1e-3 * (q > 300), "relative", "no"),
        (lambda q, k: k - q + 1e-3 * (q > 600), "relative", "partly"),
        (lambda q, k: k - q + q.double() * torch.inf, "relative", "no"),
        (lambda q, k: (k - q) / (q + 1), "translation-invariant", "no"),
        (lambda q, k: (k - q).clamp(min=-100), "bounded", "yes"),
        (lambda q, k: -(q - k).double().sqrt(), "bounded", "no"),
        (lambda q, k: (k - q).clamp(min=-100), "extrapolating", "yes"),
        (lambda q, k: (q - k) / 1000, "extrapolating", "no"),
        (lambda q, k: torch.zeros(len(q)), "decaying", "nothing"),
    ],
)
def test_biases_made_for_a_property(function, name, answer):
    assert PROPERTIES[name](bias(function)).answer == answer


def test_a_term_of_the_tokens_is_seen():
    """A bias that asks the query's token is relative, and does depend on content."""

    class Gated(Bias):
        def term(self, queries, keys, content):
            return super().term(queries, keys, content) * content.query[0]

    gated = Gated("gated", SETTING, lambda q, k: (k - q).double()[:, None])
    assert PROPERTIES["content-independent"](gated).answer == "no"
    assert PROPERTIES["relative"](gated).answer == "yes"


def test_a_falling_code_that_survives_projections():
    """A code that points one way, and less so with distance from the first token, is no such."""
    shrinking = Table(
        "shrinking",
        SETTING,
        lambda t: torch.exp(-t.double() / 100)[:, None] * torch.ones(64, dtype=torch.float64),
    )
    # Keys before a query are larger: the product rises backwards.
    assert PROPERTIES["decaying"](shrinking).answer == "no"


@pytest.mark.parametrize("setting", [Setting(256, width=32), replace(SETTING, base=50.0)])
def test_other_settings(setting):
    table = property_table(["sinusoidal", "rope", "binary", "alibi", "learned"], setting=setting)
    assert table["rope"]["relative"].answer == table["alibi"]["relative"].answer == "yes"
    assert table["sinusoidal"]["linear in shift"].answer == "yes"
    assert table["binary"]["periodic"].condition == f"after {8 * setting.length:,} tokens"
    assert table["learned"]["relative"].answer == "no"
    if setting.base == 50.0:  # all pairs turn within 512 tokens
        assert table["rope"]["extrapolating"].answer == "yes"


def test_the_same_numbers_every_time():
    names = ["learned", "t5", "fire", "rope"]
    chosen = ["relative", "decaying", "n-dimensional"]
    assert property_table(names, chosen) == property_table(names, chosen)


def test_refusals():
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        make_subject("ropee")
    with pytest.raises(ValueError, match="did you mean 'unique'"):
        property_table(properties=["uniqe"])
    with pytest.raises(ValueError, match="4 times the width"):
        Setting(length=100)


# -- docs/encoding-properties.md -------------------------------------------------------------------


def test_page_is_up_to_date_and_whole(table):
    text = properties_page.PAGE.read_text(encoding="utf-8")
    assert text == properties_page.build(table), (
        "docs/encoding-properties.md is not what the code computes: run "
        "python docs/generate/encodings/properties_page.py and look at what changed"
    )
    for name in PROPERTIES:
        assert f"**{name}**: whether" in text
    tables = text[: text.index("## Definitions")]
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (1 + len(SUBJECTS))


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "0"), (3e-14, "0"), (-1.498, "-1.5"), (float("inf"), "overflows")]
)
def test_numbers_of_the_page(number, text):
    assert properties_page.show(number) == text
