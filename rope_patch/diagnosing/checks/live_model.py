"""Whether a live model turns as its config says now."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts, frequency_difference
from rope_patch.methods import Frequencies
from rope_patch.patching.architecture.attention_source import (
    APPLY,
    inspect_forward,
    undecorated_forward,
)
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_owner

# What others replace: in most files, in Qwen 2 VL's, in Llama 4's.
_ROTATION_FUNCTIONS = (APPLY, "apply_multimodal_rotary_pos_emb", "apply_rotary_emb")

_LENGTH_DEPENDENT = ("dynamic", "longrope")  # these modules change their buffer as they go


def live_findings(facts: Facts) -> Iterator[Finding]:
    """Looks at a live model's modules; nothing where a patch of ours stands on them."""
    subject = facts.subject
    if not subject.live:
        return
    if subject.handle is None:
        for rotary in subject.rotaries:
            yield from _check_buffers(facts, rotary)
            yield from _raised_max_positions_finding(facts, rotary)
    yield from _replaced_function_finding(facts)


def _check_buffers(facts: Facts, rotary: RotaryModule) -> Iterator[Finding]:
    module: Any = rotary.module
    for kind, prefix in rotary.prefixes.items():
        layer = facts.layers.get(kind)
        if layer is None or layer.actual is None:
            continue
        built = module.rope_type[kind] if isinstance(module.rope_type, dict) else module.rope_type
        name = f"{prefix}inv_freq"
        if (
            built in _LENGTH_DEPENDENT
            and getattr(module, f"{prefix}original_inv_freq", None) is not None
        ):
            name = f"{prefix}original_inv_freq"
        buffer = getattr(module, name)
        if buffer.is_meta:
            continue
        live = Frequencies(buffer.double().cpu(), _attention_factor(module, prefix))
        if built == layer.scaling and live.close_to(layer.actual):
            continue
        cast = _dtype_it_was_cast_to(buffer, layer.actual)
        if cast is not None and built == layer.scaling:
            yield _cast_finding(facts, kind, cast, live, layer.actual)
        else:
            yield _edited_config_finding(facts, kind, str(built), live, layer.actual)


def _attention_factor(module: Any, prefix: str) -> float:
    return float(getattr(module, f"{prefix}attention_scaling"))


def _dtype_it_was_cast_to(buffer: torch.Tensor, exact: Frequencies) -> torch.dtype | None:
    """The type that exact frequencies were cast to, if that is all that befell them."""
    if buffer.shape != exact.inv_freq.shape:
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        cast = exact.inv_freq.float().to(dtype).double()
        if torch.allclose(buffer.double().cpu(), cast, rtol=1e-6, atol=0):
            return dtype
    return None


def _cast_finding(
    facts: Facts, kind: str | None, cast: torch.dtype, live: Frequencies, exact: Frequencies
) -> Finding:
    name = str(cast).removeprefix("torch.")
    off = (live.inv_freq - exact.inv_freq).abs()
    pair, length = int(off.argmax()), facts.target_length
    error = float(off[pair])
    positions = torch.arange(max(0, length - 4096), length, dtype=torch.float64)
    cos = [torch.outer(positions, f.inv_freq).cos() for f in (live, exact)]
    worst = float((cos[0] - cos[1]).abs().max())
    source = repr(facts.subject.path) if facts.subject.path else "path"
    return Finding(
        "error",
        "cast-frequencies",
        f"the frequencies were cast to {name}, which rotates far positions wrongly",
        f"at {length:,} tokens pair {pair} is {error * (length - 1):.3g} radians off, cos by up to "
        f"{worst:.2g}; a quarter of a turn is passed after {math.pi / 2 / error:,.0f} tokens",
        f"model = AutoModelForCausalLM.from_pretrained({source}, dtype=torch.{name}) instead of a "
        "cast afterwards; rope_patch.patch(model, ...) makes them exact, too",
        kind,
        {"length": length, "pair": pair, "radians": error * (length - 1), "cos": worst},
    )


def _edited_config_finding(
    facts: Facts, kind: str | None, built: str, live: Frequencies, exact: Frequencies
) -> Finding:
    layer = facts.layers[kind]
    if live.inv_freq.shape == exact.inv_freq.shape:
        count, farthest = frequency_difference(live, exact)
        shown = f"{count} of {len(live.inv_freq)} pairs differ"
        if count:
            shown += f", by up to a factor of {farthest:.6g}"
    else:
        count, farthest = len(exact.inv_freq), math.inf
        shown = f"{len(live.inv_freq)} pairs turn instead of {len(exact.inv_freq)}"
    if abs(live.attention_factor - exact.attention_factor) > 1e-6:
        shown += (
            f"; attention factor {live.attention_factor:.6g} instead of "
            f"{exact.attention_factor:.6g}"
        )
    source = repr(facts.subject.path) if facts.subject.path else "path"
    return Finding(
        "error",
        "config-edited-after-load",
        f"the model runs with {built!r} as it was built, and its config says {layer.scaling!r} "
        "now: edits after loading do nothing"
        if built != layer.scaling
        else f"the model's frequencies are not those of its config's {layer.scaling!r}: the "
        "config or the module was edited after loading",
        shown,
        f"model = AutoModelForCausalLM.from_pretrained({source}, config=model.config), which "
        "builds what the config says",
        kind,
        {"pairs": len(live.inv_freq), "changed": count, "ratio": farthest},
    )


def _raised_max_positions_finding(facts: Facts, rotary: RotaryModule) -> Iterator[Finding]:
    """max_position_embeddings edited on a live model whose rotation stayed."""
    built = getattr(rotary.module, "original_max_seq_len", None)
    now = facts.subject.config.max_position_embeddings
    if not isinstance(built, int) or not isinstance(now, int) or built == now:
        return
    dynamic = any(layer.scaling == "dynamic" for layer in facts.layers.values())
    yield Finding(
        "error",
        "length-edited-after-load",
        f"max_position_embeddings was {built:,} when the model was built and is {now:,} now: "
        + (
            "its dynamic scaling counts from the one in some places and from the other elsewhere"
            if dynamic
            else "the rotation is as before"
        ),
        f"0 of {facts.layers[next(iter(facts.layers))].geometry.rotary_dim // 2} pairs stretched "
        f"for a length {now / built:g} times the one it was built for",
        f"model.config.max_position_embeddings = {built}, then "
        f"{facts.subject.patch_call('yarn', f'length={now}')}"
        if now > built
        else f"model.config.max_position_embeddings = {built}",
        numbers={"built": built, "now": now},
    )


def _replaced_function_finding(facts: Facts) -> Iterator[Finding]:
    """Somebody's function in the place of transformers' own, for every model of the process."""
    seen = set()
    for rotary in facts.subject.rotaries:
        home = sys.modules[type(rotary.module).__module__]
        owner = find_owner(facts.subject.model, rotary)  # type: ignore[arg-type]
        places = {home.__name__: home}
        for module in owner.modules():
            if inspect_forward(type(module)).rotates:
                name = undecorated_forward(type(module)).__globals__["__name__"]
                places[name] = sys.modules.get(name, home)
        for (name, place), function in itertools.product(places.items(), _ROTATION_FUNCTIONS):
            found = getattr(place, function, None)
            origin = _defining_module(found)
            if (name, function) in seen or origin in (None, name) or _is_expected_module(origin):
                continue
            seen.add((name, function))
            off = _max_rotation_difference(place, found) if function == APPLY else None
            yield Finding(
                "warning",
                "rotation-replaced",
                f"{function} of {name} is not transformers' own but {origin}'s, for every model "
                "of this process",
                "on random vectors it "
                + (
                    "could not be tried here"
                    if off is None
                    else f"differs from transformers' own by at most {off:.3g}"
                )
                + "; it is given cos and sin, so frequencies act",
                "leave it out where rotations are to be exact (Liger: rope=False), and start the "
                "process again: it was replaced in the module",
                numbers={} if off is None else {"difference": off},
            )


def _defining_module(function: Any) -> str | None:
    function = getattr(function, "forward", function)  # a module where `kernels` is installed
    try:
        return inspect.unwrap(function).__module__
    except (AttributeError, ValueError):
        return None


def _is_expected_module(origin: str | None) -> bool:
    return bool(origin) and str(origin).split(".")[0] in ("transformers", "kernels", "rope_patch")


def _max_rotation_difference(home: Any, found: Any) -> float | None:
    """By how much two functions rotate random vectors apart; None if one cannot be tried here."""
    try:
        spec = importlib.util.find_spec(home.__name__)
        fresh = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(fresh)  # type: ignore[union-attr]
        own: Any = getattr(fresh, APPLY)
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 2, 8, 16, generator=generator)
        angles = torch.outer(torch.arange(8.0), 1e4 ** -torch.arange(0, 1, 1 / 8))
        angles = torch.cat([angles, angles], dim=-1)[None]
        expected = own(q.clone(), k.clone(), angles.cos(), angles.sin())
        got = found(q.clone(), k.clone(), angles.cos(), angles.sin())
        return max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
    except Exception:  # somebody else's code, on a device it may not be made for
        return None
