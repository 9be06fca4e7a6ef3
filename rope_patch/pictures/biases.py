"""Draw what encodings do with the distance between two tokens, and the biases that they add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.encodings.biases import (
    alibi_bias,
    alibi_slopes,
    exact_distances,
    fire_progress,
    kerple_log,
    kerple_power,
    linear_slopes,
    ntk_slopes,
    sandwich,
    t5_bucket,
)
from rope_patch.encodings.sites.buckets import BucketsSite, squeeze_distances
from rope_patch.encodings.sites.site import Stretch
from rope_patch.encodings.sites.slopes import SlopesSite
from rope_patch.encodings.tables import dot_products, sinusoidal_table
from rope_patch.pictures.picture import PictureOptions, register_picture
from rope_patch.pictures.renderer import Curve, Curves, HeatMap, Picture
from rope_patch.pictures.subject import bucket_table, read_sites
from rope_patch.utils.errors import Refused, did_you_mean

_BUCKETS = 32  # buckets of distances in T5's decoders
_SQUEEZES = {"log-tail": "far distances squeezed", "linear": "all distances divided"}
# FIRE's initial values (arXiv:2310.04418); both are learned.
FIRE_RATE, FIRE_THRESHOLD = 0.1, 512.0
_PANELS = 4  # heads that are shown, one panel each
_LOWEST = -8.0  # the darkest bias: a logit lower by 8 has 0.03% of the weight


@register_picture("decay", length=128, width=64, heads=8, base=10000.0)
def draw_decay(options: PictureOptions) -> Picture:
    """Draw dot products and biases against distance."""
    distances = torch.arange(options.length)
    products = dot_products(distances, options.width, options.base)
    generator = torch.Generator().manual_seed(0)
    size = (options.width, options.width)
    projected = []
    angles = sinusoidal_table(distances, options.width, base=options.base)
    for _ in range(3):
        weights = torch.randn(size, generator=generator, dtype=torch.float64) / options.width**0.5
        projected.append((angles @ weights @ angles[0]) / (options.width / 2))
    slope = alibi_slopes(options.heads)[options.heads // 2]
    first = [Curve("sinusoids, RoPE", distances, products / products[0])]
    first += [Curve(f"projection {n}", distances, y) for n, y in enumerate(projected, 1)]
    biases = [
        Curve("ALiBi", distances, alibi_bias(slope[None], distances)[0]),
        Curve("KERPLE, logarithmic", distances, kerple_log(distances, 1.0, 0.1)),
        Curve("KERPLE, power", distances, kerple_power(distances, 0.2, 0.5)),
        Curve("Sandwich", distances, sandwich(distances, options.heads)[options.heads // 2]),
        Curve("T5, synthetic table", distances, -t5_bucket(-distances).double().log1p()),
    ]
    progress = []
    for query in (options.length - 1, 8 * options.length - 1):
        share = fire_progress(
            torch.full_like(distances, query), query - distances, FIRE_RATE, FIRE_THRESHOLD
        )
        progress.append(Curve(f"query at {query:,}", distances, share))
    return Picture(
        [
            Curves("products of encodings", first, "distance (tokens)", "product / that at 0"),
            Curves("biases on logits", biases, "distance (tokens)", "added to the logit"),
            Curves("input of FIRE's network", progress, "distance (tokens)", "share"),
        ],
        "Products of sinusoids, and of equal vectors under RoPE, fall with distance, but after "
        "random projections, as in attention, nothing of that is left. Biases fall by "
        "construction: ALiBi in a line, KERPLE ever more slowly, Sandwich with the ripples of the "
        "sinusoids that it sums. "
        "T5 learns a number for each bucket; the steps here are those of its buckets, and their "
        "heights -ln(1 + bucket) are made up. FIRE learns a network on top of the share of the "
        f"query's own distance, so that share is drawn, with its initial c = {FIRE_RATE:g} and "
        f"threshold {FIRE_THRESHOLD:g}: of later queries the same distance is a smaller share.",
    )


@register_picture("buckets", trained=64, factor=4.0)
def draw_buckets(options: PictureOptions) -> Picture:
    """Draw T5's bucket of each distance, and how longer texts are put into trained buckets."""
    target = round(options.trained * options.factor)
    distances = torch.arange(target)
    curves = [Curve("as trained", distances, t5_bucket(-distances))]
    for method, label in _SQUEEZES.items():
        stretch = Stretch(method, options.trained, target)
        squeezed = squeeze_distances(distances, stretch, exact_distances(_BUCKETS))
        curves.append(Curve(label, distances, t5_bucket(-squeezed)))
    return Picture(
        [
            Curves(
                "32 buckets up to 128",
                curves,
                "distance (tokens)",
                "bucket",
                bounds={"trained length": options.trained},
            )
        ],
        "Near distances have a bucket each. Buckets that only distances beyond the trained length "
        "reach are untrained. Squeezing the far ones avoids those and keeps the near order; "
        "dividing all distances loses it.",
    )


@dataclass(frozen=True)
class BiasRequest:
    """What a bias is computed for.

    Attributes:
        queries: Positions, `[N, 1]`.
        keys: Positions, `[1, N]`.
        heads: Heads.
        factor: Target length / trained length.
        table: T5's trained table, `[buckets, heads]`, or None for a synthetic one.
        settings: Of T5's buckets.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    heads: int
    factor: float
    table: torch.Tensor | None
    settings: dict[str, Any]

    @property
    def distances(self) -> torch.Tensor:
        """Return query - key, `[N, N]`."""
        return self.queries - self.keys

    @property
    def steps(self) -> torch.Tensor:
        """Return 1 / heads, 2 / heads, ... 1, to make heads differ, `[heads, 1, 1]`."""
        return (torch.arange(1, self.heads + 1).double() / self.heads)[:, None, None]


Bias = Callable[[BiasRequest, "str | None"], torch.Tensor]


@dataclass(frozen=True)
class BiasKind:
    """An encoding by biases.

    Attributes:
        bias: Computes `[heads, N, N]` for a method of extension; None is as trained.
        methods: The methods, the default first.
        about: What to see, in a sentence or two.
    """

    bias: Bias
    methods: tuple[str, ...]
    about: str


def _alibi(request: BiasRequest, method: str | None) -> torch.Tensor:
    slopes = alibi_slopes(request.heads)
    if method is not None:
        slopes = {"ntk": ntk_slopes, "linear": linear_slopes}[method](slopes, request.factor)
    return alibi_bias(slopes, request.distances)


def _t5(request: BiasRequest, method: str | None) -> torch.Tensor:
    settings = {"buckets": 32, "max_distance": 128, "bidirectional": False} | request.settings
    near, length = request.distances.abs(), len(request.queries)
    if method == "max-distance":
        settings["max_distance"] = round(settings["max_distance"] * request.factor)
    elif method is not None:
        exact = exact_distances(settings["buckets"], bidirectional=settings["bidirectional"])
        stretch = Stretch(method, round(length / request.factor), length)
        near = squeeze_distances(near, stretch, exact)
    buckets = t5_bucket(-near * request.distances.sign(), **settings)
    table = request.table
    if table is None:
        # Made up: steps at T5's buckets, as steep as a head's number.
        falls = torch.arange(settings["buckets"]).double().log1p()
        table = -2 * falls[:, None] * request.steps.flatten()
    return table[buckets].permute(2, 0, 1)


def _kerple(request: BiasRequest, method: str | None) -> torch.Tensor:
    distances = request.distances.abs() / (1.0 if method is None else request.factor)
    return torch.cat(
        [kerple_log(distances, 2 * float(p), float(p))[None] for p in request.steps.flatten()]
    )


def _sandwich(request: BiasRequest, method: str | None) -> torch.Tensor:
    distances = request.distances.abs() / (1.0 if method is None else request.factor)
    rows = sandwich(distances.flatten(), request.heads)
    return rows.view(request.heads, *distances.shape)


def _fire(request: BiasRequest, method: str | None) -> torch.Tensor:
    scale = 1.0 if method is None else request.factor
    # Causal alone: keys ahead have no logarithm.
    keys = torch.minimum(request.keys, request.queries) / scale
    share = fire_progress(request.queries / scale, keys, FIRE_RATE, FIRE_THRESHOLD)
    return -8 * request.steps * share


BIASES: dict[str, BiasKind] = {
    "alibi": BiasKind(
        _alibi,
        ("ntk", "linear"),
        "Each head of ALiBi has a slope of its own, so some see far. Its ntk extension "
        "leaves the steepest head alone and divides the flattest one; linear divides all slopes, "
        "near order included.",
    ),
    "t5": BiasKind(
        _t5,
        ("log-tail", "max-distance", "linear"),
        "T5 learns a number for each bucket of distances. Without a model the numbers here are "
        "made up and fall with the bucket; the buckets' borders are T5's. log-tail puts far "
        "distances into trained buckets, max-distance widens the buckets, linear divides all "
        "distances.",
    ),
    "kerple": BiasKind(
        _kerple,
        ("linear",),
        "KERPLE falls with the logarithm of the distance, with two trained numbers a head, which "
        "are made up here.",
    ),
    "sandwich": BiasKind(
        _sandwich,
        ("linear",),
        "Sandwich sums cosines of the distance, and divides the sum by a number that grows with "
        "the head.",
    ),
    "fire": BiasKind(
        _fire,
        ("linear",),
        "FIRE's network reads the distance as a share of the query's position, once that is above "
        f"{FIRE_THRESHOLD:g}. The network here is made up: a share of 1 takes 1 to 8 from the "
        "logit.",
    ),
}


@register_picture("bias", encoding=None, model=None, method=None, length=128, heads=8, factor=4.0)
def draw_bias(options: PictureOptions) -> Picture:
    """Draw the matrix that ALiBi, T5, KERPLE, FIRE or Sandwich adds, as trained and extended."""
    name, request, source = _request(options)
    kind = BIASES[name]
    method = options.method or kind.methods[0]
    if method not in kind.methods:
        raise Refused(
            f"method {method!r} does not extend {name}{did_you_mean(method, kind.methods)}: "
            f"expected one of {', '.join(kind.methods)}"
        )
    chosen = torch.linspace(0, request.heads - 1, min(_PANELS, request.heads)).round().long()
    after = f"{method} ×{options.factor:g}"
    trained = round(options.length / options.factor)
    biases = {"trained": kind.bias(request, None), after: kind.bias(request, method)}
    if not request.settings.get("bidirectional"):
        ahead = request.distances < 0
        biases = {label: bias.masked_fill(ahead, torch.nan) for label, bias in biases.items()}
    limits = (_LOWEST, 0.0)
    if request.table is not None:
        limits = (float(request.table.min()), float(request.table.max()))
    panels = [
        HeatMap(
            f"head {int(head)}, {label}",
            bias[head],
            "key (tokens)",
            "query (tokens)",
            limits,
            "added to the logit",
            trained=trained,
        )
        for label, bias in biases.items()
        for head in chosen
    ]
    return Picture(
        panels,
        f"{source}Darker keys get less attention"
        + ("" if request.table is not None else f"; {_LOWEST:g} and lower is darkest")
        + f". The dashed square is the trained length, {trained} tokens. {kind.about}",
        columns=len(chosen),
    )


def _request(options: PictureOptions) -> tuple[str, BiasRequest, str]:
    """Return the encoding's name, what to compute, and the model's name as a sentence."""
    positions = torch.arange(options.length)
    heads, table, source = options.heads, None, ""
    settings: dict[str, Any] = {}
    name = options.encoding or "alibi"
    if options.model is not None:
        options.refuse(("encoding", "heads"), "the model decides it")
        sites = read_sites(options.model)
        # Decoders first: of an encoder keys ahead have a bias, too.
        sites = sorted(sites, key=lambda site: site.part == "encoder")
        site = next((s for s in sites if isinstance(s, SlopesSite | BucketsSite)), None)
        if site is None:
            kinds = " and ".join(dict.fromkeys(each.kind for each in sites)) or "unknown"
            raise Refused(f"model has {kinds} positions: expected ALiBi's slopes or T5's buckets")
        name, source = site.kind, f"{site.name}. "
        if isinstance(site, SlopesSite):
            heads = site.heads
        else:
            table, settings = bucket_table(site)
            heads = table.shape[1]
    if name not in BIASES:
        raise Refused(
            f"unknown encoding {name!r}{did_you_mean(name, BIASES)}; there are {', '.join(BIASES)}"
        )
    request = BiasRequest(
        positions[:, None], positions[None], heads, options.factor, table, settings
    )
    return name, request, source
