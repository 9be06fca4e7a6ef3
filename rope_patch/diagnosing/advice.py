"""Recommend a method for a target length, by a few sourced rules and without measuring.

In come the facts and findings of a diagnosis, and a table of pairs for each layer type; out comes
`Advice`: what to do, the reasons with their sources, and lines of code that `check` has checked on
the model. `build_pair_table` compares a layer type's pairs before and after an extension, with the
bounds on the base that two papers give (`base_bound`, `critical_base`).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import shlex
from dataclasses import dataclass, replace

import torch

from rope_patch.diagnosing.facts import Facts, Finding
from rope_patch.entry_points import check
from rope_patch.extension import Extension
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.patching.architecture.attention_source import inspect_forward, undecorated_forward
from rope_patch.utils.errors import Refused

# Largest factor recommended without training: what this project measured (SmolLM2, README). The
# YaRN paper's own models, x16 and x32, were trained.
MAX_UNTRAINED_FACTOR = 2.0

# Source of attentions that rotate only with a sliding window (Cohere 2, EXAONE 4, ...).
_IN_WINDOWS = re.compile(
    r"if self\.(?:sliding_window is not None|sliding_window is None or self\.is_sliding"
    r"|is_local_attention)\b[^\n]*:\n(?:[^\n]*\n)?[^\n]*apply_rotary_pos_emb"
)

_YARN = "arXiv:2309.00071"
_MEASURED = "README, SmolLM2-135M-Instruct Q4_1 at factor 2"


@dataclass(frozen=True)
class Reason:
    """A reason for a recommendation, and its source; facts of the config have none."""

    text: str
    source: str = ""


@dataclass(frozen=True)
class Advice:
    """The recommendation for a target length.

    Attributes:
        method: The method to use; None if none is needed or none is possible.
        summary: What to do, in a sentence.
        reasons: The reasons.
        python: The line to type; empty if nothing is to be done. It was checked on the model, or
            on one without weights.
        shell: The command that measures or trains it.
    """

    method: str | None
    summary: str
    reasons: tuple[Reason, ...]
    python: str = ""
    shell: str = ""


_UNKNOWN_USE = Reason("how much of the longer text this model uses is not known: measure")


def advise(
    facts: Facts,
    rotations: dict[str | None, PairTable],
    findings: list[Finding],
    request: Extension,
) -> Advice:
    """Return the recommendation for the target length.

    Args:
        facts: Facts about the layer types.
        rotations: Tables of pairs of the layer types that a method would change.
        findings: Findings of the checks.
        request: The request, of which the recommended call takes all but method and target.
    """
    trained = next(iter(rotations.values())).geometry.trained_length
    length, reasons = facts.target_length, []
    if errors := [found for found in findings if found.severity == "error"]:
        codes = ", ".join(dict.fromkeys(found.code for found in errors))
        reasons.append(Reason(f"first put right what is found above ({codes})"))
    if length <= trained:
        reasons.append(Reason(f"training went to {trained:,} tokens, {length:,} are within"))
        return Advice(None, "no extension is needed", tuple(reasons))
    if (window := _window_if_only_windows_rotate(facts)) and window <= trained:
        reasons.append(
            Reason(
                f"only layers with a window of {window:,} tokens rotate, and the others not at "
                "all: no distance is new to a pair, so nothing is to be stretched"
            )
        )
        reasons.append(_UNKNOWN_USE)
        return Advice(
            None,
            "nothing is to be stretched",
            tuple(reasons),
            shell=_compare_command(facts, "none", request),
        )
    scaled_layers = [layer for layer in facts.layers.values() if layer.scaling != "default"]
    if scaled_layers and length <= facts.promised_length:
        return _already_long_enough(facts, trained, reasons, request)
    ratio = length / trained
    candidates = ("dynamic-yarn", "yarn") if ratio <= MAX_UNTRAINED_FACTOR else ("yarn",)
    patch_error = facts.subject.problem
    for method in candidates:
        patch_error = _patch_error(facts, method, request)
        if patch_error is None:
            reasons += _method_reasons(method, ratio, trained) + _model_reasons(facts, rotations)
            arguments = _python_arguments(length, request)
            return Advice(
                method,
                f"{method}, ×{ratio:.4g}"
                + ("" if ratio <= MAX_UNTRAINED_FACTOR else ", and fine-tune it at that length"),
                tuple(reasons),
                facts.subject.patch_call(method, arguments),
                _shell_command(facts, method, ratio, request),
            )
        reasons.append(Reason(f"{method} is refused here: {patch_error}"))
    return Advice(None, "this model cannot be extended as it is", tuple(reasons))


def _already_long_enough(
    facts: Facts, trained: int, reasons: list[Reason], request: Extension
) -> Advice:
    """Return the advice if the config's own scaling already reaches the length."""
    scalings = sorted({x.scaling for x in facts.layers.values()} - {"default"})
    scaling_names = ", ".join(scalings)
    reasons.append(
        Reason(
            f"the config's own {scaling_names} reaches {facts.promised_length:,} tokens, from "
            f"{trained:,} trained"
        )
    )
    advice = Advice(None, "the config already does it", tuple(reasons))
    if (
        scalings == ["dynamic"]
        or "yarn" not in scalings
        or _patch_error(facts, "dynamic-yarn", request)
    ):
        return advice
    trade_off = Reason(
        f"it also stretches texts that fit into {trained:,} tokens, which dynamic-yarn leaves "
        "unscaled; which is better depends on what the model was trained under: measure both",
        f"{_YARN} section 3.3",
    )
    line = facts.subject.patch_call("dynamic-yarn", _python_arguments(facts.target_length, request))
    shell = _compare_command(facts, "none,dynamic-yarn", request)
    return Advice(
        None,
        "the config already does it; if most texts are short, try dynamic-yarn",
        (*reasons, trade_off),
        line,
        shell,
    )


def _method_reasons(method: str, ratio: float, trained: int) -> list[Reason]:
    if method.startswith("dynamic"):
        return [
            Reason(
                f"texts of up to {trained:,} tokens are rotated as they were, bit for bit, and "
                "longer ones no more than their length asks for",
                f"{_YARN} section 3.3",
            ),
            Reason(f"×{ratio:.4g} may do without training", _MEASURED),
            Reason(
                "for fine-tuning, and for engines other than transformers (they run static methods "
                'only, rope-patch export says how): "yarn" in its place',
                "vllm-project/vllm issue 5093",
            ),
        ]
    static = Reason("one rotation for all lengths, which every engine reads from the config")
    if ratio <= MAX_UNTRAINED_FACTOR:
        return [static, Reason(f"×{ratio:.4g} may do without training", _MEASURED)]
    return [
        Reason(
            "its authors trained 400 steps at the length for ×16, and 200 more for ×32; what it "
            f"does without training beyond ×{MAX_UNTRAINED_FACTOR:g} is not known for this model",
            f"{_YARN} section 4",
        ),
        static,
    ]


def _model_reasons(facts: Facts, rotations: dict[str | None, PairTable]) -> list[Reason]:
    """Return the reasons that follow from this model's architecture and config."""
    reasons = []
    for layer_type, rotation in rotations.items():
        geometry, bound = rotation.geometry, rotation.base_bound
        where = "" if layer_type is None else f" of {layer_type}"
        if bound is not None and not geometry.base and geometry.theta < bound:
            reasons.append(
                Reason(
                    f"theta {geometry.theta:,.0f}{where} is below {bound:,.0f}, a bound for "
                    f"{facts.target_length:,} tokens, below which models were found to retrieve "
                    "badly at "
                    'a fine perplexity: test retrieval; "abf" and training raise theta',
                    "arXiv:2405.14591",
                )
            )
        if facts.layers[layer_type].scaling != "default":
            reasons.append(_base_reason(rotation, facts.layers[layer_type].scaling, where))
    unchanged_types = [
        str(layer_type) for layer_type in facts.layers if layer_type not in rotations
    ]
    if unchanged_types:
        windows = all(
            "sliding" in layer_type or "chunked" in layer_type for layer_type in unchanged_types
        )
        stay = "see a window only, and stay as they are" if windows else "stay as they are"
        reasons.append(Reason(f"{', '.join(unchanged_types)} layers {stay}"))
    rotates_by_layer = getattr(facts.subject.config, "no_rope_layers", None)
    if isinstance(rotates_by_layer, list) and 0 in rotates_by_layer:
        reasons.append(
            Reason(
                f"{rotates_by_layer.count(0)} of {len(rotates_by_layer)} layers do not rotate at "
                "all, and no "
                "method changes them; how far they carry is not known"
            )
        )
    reasons.append(_UNKNOWN_USE)
    return reasons


def _window_if_only_windows_rotate(facts: Facts) -> int | None:
    """Return the sliding window in tokens if only windowed layers rotate, else None."""
    window = getattr(facts.subject.config, "sliding_window", None)
    if facts.subject.model is None or not isinstance(window, int):
        return None
    attention_classes = {
        type(m) for m in facts.subject.model.modules() if inspect_forward(type(m)).rotates
    }
    sources = [
        inspect.getsource(undecorated_forward(attention_class))
        for attention_class in attention_classes
    ]
    return window if sources and all(_IN_WINDOWS.search(source) for source in sources) else None


def _base_reason(rotation: PairTable, scaling: str, where: str) -> Reason:
    trained = rotation.geometry.trained_length
    if rotation.geometry.base:
        return Reason(
            f"the config's own {scaling}{where} was trained in: it starts from what the model runs "
            f'with and its full {trained:,} tokens (start="running")'
        )
    return Reason(
        f"it replaces the config's own {scaling}{where}, from the {trained:,} tokens before "
        '(start="unscaled")'
    )


def _patch_error(facts: Facts, method: str, request: Extension) -> str | None:
    """Return the error that `patch` would raise, or None."""
    if facts.subject.model is None:
        return facts.subject.problem
    try:
        check(facts.subject.model, _request_for(request, method, facts.target_length))
    except Refused as error:
        return str(error)
    return None


def _request_for(request: Extension, method: str, length: int) -> Extension:
    """Return the request for a recommended method, with its default options."""
    return replace(request, method=method, factor=None, length=length, options={})


def _python_arguments(length: int, request: Extension) -> str:
    arguments = _request_for(request, request.method, length).arguments()
    return ", ".join(f"{k}={v!r}".replace("'", '"') for k, v in arguments.items())


def _shell_command(facts: Facts, method: str, ratio: float, request: Extension) -> str:
    if not facts.subject.is_loadable:
        return ""  # the commands load models that generate text
    if ratio <= MAX_UNTRAINED_FACTOR:
        methods = "yarn,dynamic-yarn" if method == "dynamic-yarn" else method
        return _compare_command(facts, f"none,{methods}", request)
    name = shlex.quote(facts.subject.display_name)
    return (
        f"rope-patch finetune --config yarn_64k --model {name} "
        f"--factor {ratio:g} --train_length {facts.target_length}{facts.subject.trust_option}"
        + (" --anyway true" if request.anyway else "")
    )


def _compare_command(facts: Facts, methods: str, request: Extension) -> str:
    name, trained = shlex.quote(facts.subject.display_name), request.trained_length
    rest = f" --trained-length {trained}" if trained else ""
    rest += facts.subject.trust_option + (" --anyway" if request.anyway else "")
    return f"rope-patch compare {name} --method {methods} --length {facts.target_length}{rest}"


MAX_LENGTH = 2**20  # tokens; the longest search for a base, which takes seconds

_BASE_RATIO = 1.003  # between tested bases; only such steps reproduce the paper's values
_MAX_BASE = 1e12
_BLOCK = 512  # distances per block of the matrix product
_AT_ONCE = 16  # bases tested together
# A base 1% above a failing one is tested at that one's distance, and up to 1% beyond it.
_SLOPES = torch.linspace(0, 1, 9, dtype=torch.float64, device="cpu")


def failing_distance(inv_freq: torch.Tensor, length: int, near: int = 0) -> int | None:
    """Return a distance at which a similar key is expected to score below a random one.

    There sum_i cos(m f_i) < 0 (Men et al. 2024, arXiv:2405.14591, theorem 1: queries and
    keys with independent, equally distributed components).

    Args:
        inv_freq: Radians per token of each pair, `[R / 2]`.
        length: The largest distance m, in tokens.
        near: Distance to test first.

    Returns:
        The distance; None if there is none up to the length.
    """
    f = inv_freq.double().cpu()
    if near:
        around = 16 + near // 250
        m = torch.arange(max(0, near - around), min(length, near + around) + 1, device="cpu")
        sums = torch.outer(m.double(), f).cos().sum(-1)
        if float(sums.min()) < -1e-9:
            return int(m[sums.argmin()])
    # cos((c + r) f) = cos(c f) cos(r f) - sin(c f) sin(r f): all distances in one matrix product.
    r = torch.outer(f, torch.arange(_BLOCK, dtype=torch.float64, device="cpu"))
    right = torch.cat([r.cos(), -r.sin()])
    first, count = 0, 1
    while first <= length:
        last = min(first + count * _BLOCK, (length // _BLOCK + 1) * _BLOCK)
        c = torch.outer(torch.arange(first, last, _BLOCK, dtype=torch.float64, device="cpu"), f)
        sums = (torch.cat([c.cos(), c.sin()], dim=1) @ right).flatten()[: length + 1 - first]
        if float(sums.min()) < -1e-9:
            return first + int(sums.argmin())
        first, count = last, min(4 * count, 512)  # short distances mostly decide
    return None


@functools.lru_cache(maxsize=64)
def base_bound(rotary_dim: int, length: int) -> float | None:
    """Return the smallest base whose attention separates similar from random tokens at a length.

    "Base of RoPE bounds context length" (Men et al. 2024, arXiv:2405.14591): below it a
    model trained to the length may have a fine perplexity and not retrieve. Bases 0.3% apart are
    tested from small to large. Some bases just above the first success fail again, so this is a
    bound, not a recommendation.

    Args:
        rotary_dim: Rotated dimensions of a head.
        length: Length in tokens.

    Returns:
        The base; None if no base up to 1e12 works (one or two pairs never do), or the length is
        above `MAX_LENGTH`.
    """
    if length > MAX_LENGTH:
        return None
    exponent = -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    bases = [2.0]
    while (base := bases[-1] * _BASE_RATIO) < _MAX_BASE:
        bases.append(base)
    first, near = 0, 0
    while first < len(bases):
        distance = failing_distance(bases[first] ** exponent, length, near)
        if distance is None:
            return bases[first]
        first, near = first + 1, distance
        # The next bases mostly fail nearby. A negative sum at any distance is proof, so that many
        # bases are tested at once at few distances; only one without is tested at all of them.
        while near and first < len(bases):
            some = torch.tensor(bases[first : first + _AT_ONCE], dtype=torch.float64, device="cpu")
            stretches = torch.outer(some / bases[first - 1] - 1, _SLOPES) + 1
            m = (near * stretches).round().clamp(max=length)
            sums = (m[..., None] * some[:, None, None] ** exponent).cos().sum(-1)
            lowest, at = sums.min(dim=1)
            passed = int((lowest < -1e-9).long().cumprod(0).sum())
            if passed:
                first, near = first + passed, int(m[passed - 1, at[passed - 1]])
            if passed < _AT_ONCE:
                break
    return None


def critical_base(theta: float, trained_length: int, length: int) -> float | None:
    """Return the base at which the critical pair rotates over the target length as over training's.

    Liu et al. 2023, arXiv:2310.05209, theorem 2: theta^(ln(length / 2 pi) / ln(trained / 2 pi)).

    Args:
        theta: The model's base.
        trained_length: Trained length in tokens.
        length: Target length in tokens.

    Returns:
        The base; None if no pair completes a rotation within the trained length.
    """
    trained = trained_length / (2 * math.pi)
    if trained <= 1:
        return None
    return theta ** (math.log(max(length, trained_length) / (2 * math.pi)) / math.log(trained))


# Rotations computed in float32 and in float64 differ by up to some units in float32's last place.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Pair:
    """Two dimensions that rotate together.

    Attributes:
        pair: Index, from the fastest.
        wavelength: Tokens per rotation before an extension; infinite if the pair does not rotate.
        turns: Rotations within the trained length, before.
        stretch: Wavelength under the method / before; infinite if it no longer rotates.
        turns_at_length: Rotations within the target length under the method.
    """

    pair: int
    wavelength: float
    turns: float
    stretch: float
    turns_at_length: float

    @property
    def extrapolates(self) -> bool:
        """Whether the target length takes the pair beyond its angles in training."""
        return self.turns < 1 and self.turns_at_length > self.turns * (1 + _ROUNDING)


@dataclass(frozen=True)
class PairTable:
    """The pairs of one layer type.

    Attributes:
        geometry: The geometry before the extension.
        rope_type: The config's own scaling.
        own_yarn: A phrase on the config's own YaRN and whether it was trained in; None if it has
            none.
        critical_dimension: The first pair without a full rotation in training; the number of pairs
            if there is none.
        attention_factor: The method's multiplier of cos and sin.
        yarn_attention_factor: YaRN's attention factor for the target length.
        base_bound: The smallest base for the target length (`base_bound`); None if
            there is none or the length is too large to search.
        critical_base: The base that keeps the critical pair within its trained angles at the target
            length (`critical_base`); None if the trained length is too short, or the
            geometry is already scaled.
        pairs: Every rotated pair.
    """

    geometry: Geometry
    rope_type: str
    own_yarn: str | None
    critical_dimension: int
    attention_factor: float
    yarn_attention_factor: float
    base_bound: float | None
    critical_base: float | None
    pairs: tuple[Pair, ...]


def build_pair_table(
    geometry: Geometry,
    after: Frequencies,
    length: int,
    rope_type: str,
    own_yarn: str | None = None,
    *,
    largest_distance: int | None = None,
) -> PairTable:
    """Return the table of pairs before and after an extension.

    Args:
        geometry: The geometry before.
        after: The frequencies at the target length.
        length: The target length in tokens.
        rope_type: The config's own scaling.
        own_yarn: See `PairTable`.
        largest_distance: The largest distance at which tokens are compared, if not the length.
    """
    distance = length if largest_distance is None else largest_distance
    trained = geometry.trained_length
    pairs = tuple(
        Pair(
            pair=i,
            wavelength=2 * math.pi / before if before else math.inf,
            turns=trained * before / (2 * math.pi),
            stretch=before / now if now else (math.inf if before else 1.0),
            turns_at_length=distance * now / (2 * math.pi),
        )
        for i, (before, now) in enumerate(
            zip(geometry.inv_freq().tolist(), after.inv_freq.tolist(), strict=True)
        )
    )
    return PairTable(
        geometry=geometry,
        rope_type=rope_type,
        own_yarn=own_yarn,
        critical_dimension=next((p.pair for p in pairs if p.turns < 1), len(pairs)),
        attention_factor=after.attention_factor,
        yarn_attention_factor=yarn_mscale(max(1.0, length / trained)),
        base_bound=base_bound(geometry.rotary_dim, length),
        critical_base=None if geometry.base else critical_base(geometry.theta, trained, length),
        pairs=pairs,
    )
