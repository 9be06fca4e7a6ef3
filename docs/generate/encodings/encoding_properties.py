"""Ten properties of positional encodings, each by a numerical test with a tolerance.

Lists of such properties are often opinions. Here each answer comes with the number that it rests
on, and each function's docstring says what is measured. N is the trained length, R the reach in
multiples of it; random numbers have fixed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from encoding_subjects import (
    SUBJECTS,
    CodeSubject,
    Content,
    Setting,
    Subject,
    make_axis,
    make_subject,
)

from rope_patch.utils.errors import Refused, did_you_mean

EXACT = 1e-6  # relative; what is equal in exact numbers comes out below 1e-9 here
_GROWTH = 1.03  # a largest value that grows by less has stopped growing
_SLACK = 0.01  # of a range, by which an input may leave it
_FLAT = 0.9  # of the size at near distances, above which random products have not fallen
_DRAWS = 64
_PAIRS = 256
_FAR = 2**20  # tokens


@dataclass(frozen=True)
class Verdict:
    """Whether an encoding has a property.

    Attributes:
        answer: "yes", "no", or "partly"; "no code" and "nothing" where there is nothing to test.
        number: What was measured; see the property's function.
        condition: What "partly" means, or what was seen.
    """

    answer: str
    number: float | None = None
    condition: str = ""


_NO_CODE = Verdict("no code")


def measure_unique(subject: Subject) -> Verdict:
    """Test whether the codes of N positions are different.

    Number: smallest distance of two codes / largest distance. Yes above 1e-6.
    """
    if not isinstance(subject, CodeSubject):
        return _NO_CODE
    code = subject.code(torch.arange(subject.setting.length))
    distances = torch.nn.functional.pdist(code)
    share = float(distances.min() / distances.max())
    return Verdict(_answer(share > EXACT), share)


def measure_bounded(subject: Subject) -> Verdict:
    """Test whether the largest value stops growing.

    Number: largest magnitude of a code (of a bias, if there is no code) up to 2^20 tokens / that up
    to 2^19. Yes below 1.03. A table that ends is bounded.
    """
    if subject.rows is not None:
        return Verdict("yes", None, f"ends after {subject.rows:,} rows")
    near = _largest(subject, _FAR // 2)
    far = max(near, _largest(subject, _FAR))
    if far == 0:
        return Verdict("nothing")
    growth = far / near if far < float("inf") else far
    return Verdict(_answer(growth < _GROWTH), growth)


def measure_relative(subject: Subject) -> Verdict:
    """Test whether a logit stays the same if query and key move together.

    What positions add to the logit of i and j is compared with that of i + s and j + s, for random
    token vectors and projections. Number: largest change / largest term, in texts of R N tokens.
    Yes below 1e-6; partly, if only texts of N tokens pass.
    """
    content = Content.draw(subject.setting.width, 1)
    return _measure_shift(subject, lambda q, k: subject.term(q, k, content))


def measure_translation_invariant(subject: Subject) -> Verdict:
    """Test whether the similarity of two positions stays the same if both move together.

    Similarity is the product of two codes, without token vectors and projections, or the bias.
    Number and tolerance are those of "relative".
    """
    return _measure_shift(subject, subject.similarity)


def measure_decaying(subject: Subject) -> Verdict:
    """Test whether similarity falls with distance, up to N tokens.

    It is the mean over 16 queries, with keys before them, and keys after them if the encoding is
    meant for both. Yes, if it never rises; partly, if its means over octaves of distance (1, 2-3,
    4-7, ...) fall ("in the mean"). Codes are then looked at after 64 random projections (for
    rotations: of random token vectors). If the root mean square of these products stays above 0.9
    from the nearest octave to the farthest, "of equal vectors" alone. Number: similarity in the
    farthest octave / that at distance 0; for biases their difference in logits; of the side or head
    that falls least. A table that ends is measured up to a third of its rows.
    """
    span = subject.setting.length if subject.rows is None else subject.rows // 3
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(span, 2 * span, (16,), generator=generator)
    distances = torch.arange(span).repeat_interleave(len(queries))
    queries = queries.repeat(span)
    sides = [queries - distances] + [queries + distances] * (not subject.causal)
    similar = torch.cat([subject.similarity(queries, keys) for keys in sides], 1)
    curves = similar.unflatten(0, (span, -1)).mean(1)
    if not curves.any():
        return Verdict("nothing")
    means = _octaves(curves)
    has_code = isinstance(subject, CodeSubject)
    number = float((means[-1] / curves[0] if has_code else means[-1] - curves[0]).max())
    steps = curves.diff(dim=0)
    never_rises = bool((steps <= 0).all() and (steps < 0).any(0).all())
    if not never_rises and not (means.diff(dim=0) < 0).all():
        return Verdict("no", number)
    condition = ""
    if isinstance(subject, CodeSubject):
        size = _random_size(subject, span)
        if size > _FLAT:
            return Verdict("partly", number, f"of equal vectors; random ones keep {size:.2f}")
        condition = f"; random vectors fall to {size:.2f}"
    if never_rises:
        return Verdict("yes", number, condition.removeprefix("; "))
    return Verdict("partly", number, f"in the mean{condition}")


def measure_linear_in_shift(subject: Subject) -> Verdict:
    """Test whether the code of t + s is one matrix times the code of t, for all t.

    For s = 1, 7 and the width a matrix is fitted by least squares on a random half of N positions
    and tried on the rest. Number: largest error / largest component. Yes below 1e-6.
    """
    if not isinstance(subject, CodeSubject):
        return _NO_CODE
    shifts = (1, 7, subject.setting.width)
    span = (subject.setting.length if subject.rows is None else subject.rows) - max(shifts)
    positions = torch.arange(span)
    code = subject.code(positions)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(span, generator=generator)
    half, rest = order[: span // 2], order[span // 2 :]
    worst = 0.0
    for shift in shifts:
        moved = subject.code(positions + shift)
        # This driver allows codes of fewer directions than components.
        fit = torch.linalg.lstsq(code[half], moved[half], rcond=1e-15, driver="gelsd")
        error = (code[rest] @ fit.solution - moved[rest]).abs().max() / moved.abs().max()
        worst = max(worst, float(error))
    return Verdict(_answer(worst < EXACT), worst)


def measure_n_dimensional(subject: Subject) -> Verdict:
    """Test whether the usual form for two axes tells all places of a grid apart.

    Codes: half of the components, or of a rotation's pairs, for each axis. Biases: one for each
    axis, added; learned ones have parameters for each axis. Number: smallest distance between the
    codes of two points of an 8 × 8 grid (the biases of two steps in all heads) / largest. Yes above
    1e-6.
    """
    axis = torch.arange(8)
    rows, columns = (points.flatten() for points in torch.meshgrid(axis, axis, indexing="ij"))
    first, second = make_axis(subject, 0), make_axis(subject, 1)
    if isinstance(first, CodeSubject) and isinstance(second, CodeSubject):
        codes = first.code(rows), second.code(columns)
        places = torch.cat([code[:, : code.shape[1] // 2] for code in codes], 1)
    else:
        query = torch.full_like(rows, 7)
        places = first.similarity(query, query - rows) + second.similarity(query, query - columns)
    distances = torch.nn.functional.pdist(places)
    if not distances.any():
        return Verdict("nothing")
    share = float(distances.min() / distances.max())
    return Verdict(_answer(share > EXACT), share)


def measure_extrapolating(subject: Subject) -> Verdict:
    """Test whether inputs beyond the trained length are in the range of those up to it.

    Inputs are the components of an added code, the angle (up to a full turn) and factor of each
    pair of a rotation, and for biases the factor exp(bias) of attention weights in each head.
    Number: share of components, pairs or heads that stay within the range of texts of N tokens,
    widened by a hundredth, in texts of R N. Yes at 1, no at 0, partly between. Inputs that never
    change are left out. It is a property of the function: it says what is new to a model, not what
    the model makes of it.
    """
    setting = subject.setting
    if subject.rows is not None:
        return Verdict("no", 0.0, f"ends after {subject.rows:,} rows")
    seen = subject.inputs(*_triangle(torch.arange(setting.length)))
    later = torch.arange(setting.length, setting.length * setting.reach, setting.reach - 1)
    new = subject.inputs(*_triangle(later))
    low, high = seen.amin(0), seen.amax(0)
    rounding = EXACT * torch.maximum(low.abs(), high.abs()) + EXACT
    slack = _SLACK * (high - low) + rounding
    inside = ((new.amin(0) >= low - slack) & (new.amax(0) <= high + slack)).all(1)
    spread = torch.maximum(high, new.amax(0)) - torch.minimum(low, new.amin(0))
    changes = (spread > rounding).any(1)
    if not changes.any():
        return Verdict("nothing")
    share = float(inside[changes].double().mean())
    units = f"{int(inside[changes].sum())} of {int(changes.sum())}"
    return Verdict("yes" if share == 1 else "partly" if share else "no", share, units)


def measure_periodic(subject: Subject) -> Verdict:
    """Test whether all codes come back after some number of tokens.

    Number: for the best period up to R N (half of a table that ends), the largest change of a
    component over N positions / largest component. Yes below 1e-6, with the period.
    """
    if not isinstance(subject, CodeSubject):
        return _NO_CODE
    setting = subject.setting
    span, reach = setting.length, setting.length * setting.reach
    if subject.rows is not None:
        span = reach = subject.rows // 2
    code = subject.code(torch.arange(span + reach))
    # A few positions find the period, all of them confirm it.
    few = torch.arange(0, span, max(span // 16, 1))
    periods = torch.arange(1, reach + 1)
    changes = (code[few + periods[:, None]] - code[few]).abs().amax((1, 2))
    period = int(periods[changes.argmin()])
    change = float((code[period : period + span] - code[:span]).abs().max() / code.abs().max())
    found = change < EXACT
    return Verdict(_answer(found), change, f"after {period:,} tokens" if found else "")


def measure_content_independent(subject: Subject) -> Verdict:
    """Test whether what positions add to a logit is the same for all tokens.

    Number: largest change of the term between 8 draws of token vectors and projections / largest
    term. Yes below 1e-6.
    """
    queries, keys = _some_pairs(subject)
    width = subject.setting.width
    terms = torch.stack(
        [subject.term(queries, keys, Content.draw(width, seed)) for seed in range(8)]
    )
    if not terms.any():
        return Verdict("nothing")
    change = float((terms - terms[0]).abs().max() / terms.abs().max())
    return Verdict(_answer(change < EXACT), change)


PROPERTIES: dict[str, Callable[[Subject], Verdict]] = {
    "unique": measure_unique,
    "bounded": measure_bounded,
    "relative": measure_relative,
    "decaying": measure_decaying,
    "translation-invariant": measure_translation_invariant,
    "linear in shift": measure_linear_in_shift,
    "n-dimensional": measure_n_dimensional,
    "extrapolating": measure_extrapolating,
    "periodic": measure_periodic,
    "content-independent": measure_content_independent,
}


def property_table(
    encodings: Iterable[str] = SUBJECTS,
    properties: Iterable[str] = tuple(PROPERTIES),
    setting: Setting | None = None,
) -> dict[str, dict[str, Verdict]]:
    """Measure properties of encodings.

    Args:
        encodings: Names, of `SUBJECTS`.
        properties: Names, of `PROPERTIES`.
        setting: What encodings are made for.

    Returns:
        A verdict by encoding and property.

    Raises:
        ValueError: A name is unknown.
    """
    names = list(properties)
    for name in names:
        if name not in PROPERTIES:
            raise Refused(f"there is no property {name!r}{did_you_mean(name, PROPERTIES)}")
    subjects = [make_subject(name, setting) for name in encodings]
    return {
        subject.name: {name: PROPERTIES[name](subject) for name in names} for subject in subjects
    }


def _answer(holds: bool) -> str:
    return "yes" if holds else "no"


def _some_pairs(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random positions of queries and of keys before them, in the first half of N tokens."""
    generator = torch.Generator().manual_seed(0)
    span = subject.setting.length // 2
    drawn = torch.randint(0, span, (2, _PAIRS), generator=generator)
    return drawn.amax(0), drawn.amin(0)


def _triangle(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each query with 65 keys from itself to the first token."""
    share = torch.linspace(0, 1, 65, dtype=torch.float64)
    keys = (queries[:, None] * share).long()
    return queries[:, None].expand_as(keys).flatten(), keys.flatten()


def _largest(subject: Subject, length: int) -> float:
    """Return the largest magnitude of a code or bias up to a length."""
    positions = torch.unique(torch.logspace(0, math.log2(length), 1024, base=2).long())
    if isinstance(subject, CodeSubject):
        codes = subject.code(positions), subject.key_code(positions)
        return max(float(code.abs().max()) for code in codes)
    return float(subject.similarity(*_triangle(positions)).abs().max())


def _measure_shift(
    subject: Subject, value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Verdict:
    """Compare values of pairs with those of the same pairs further on, within N and within R N."""
    setting = subject.setting
    half = setting.length // 2
    queries, keys = _some_pairs(subject)
    here = value(queries, keys)
    scale = here.abs().max()
    if not scale:
        return Verdict("nothing")

    def change(*shifts: int) -> float:
        moved = torch.stack([value(queries + shift, keys + shift) for shift in shifts])
        return float((moved - here).abs().max() / scale)

    within = change(1, 7, half)
    if not within <= EXACT:  # or NaN
        return Verdict("no", within)
    if subject.rows is not None:
        return Verdict("yes", within)
    beyond = change(setting.length, (setting.reach - 1) * setting.length)
    if not beyond <= EXACT:
        return Verdict("partly", beyond, "up to the trained length")
    return Verdict("yes", max(within, beyond))


def _octaves(curves: torch.Tensor) -> torch.Tensor:
    """Return means over distances 1, 2-3, 4-7, ..., `[octaves, curves]`."""
    starts = [2**power for power in range(len(curves).bit_length() - 1)]
    return torch.stack([curves[start : 2 * start].mean(0) for start in starts])


def _random_size(subject: CodeSubject, span: int) -> float:
    """Return the size of random products in the farthest octave, as a share of the nearest."""
    distances = torch.arange(span).repeat(4)  # of 4 queries
    queries = torch.arange(span, 2 * span, span // 4)[:4].repeat_interleave(span)
    squares = torch.zeros(len(queries), dtype=torch.float64)
    for seed in range(_DRAWS):
        content = Content.draw(subject.setting.width, seed)
        squares += subject.product(queries, queries - distances, content) ** 2
    sizes = _octaves(squares.view(4, span).T).mean(1).sqrt()
    return float(sizes[-1] / sizes[0])
