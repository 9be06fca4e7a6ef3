"""Check a live model's rotation against its config, and an adapter's against its base model."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rope_patch.diagnosing.facts import Facts, Finding, LayerFacts, frequency_difference
from rope_patch.methods import Frequencies, Method
from rope_patch.patching.architecture.attention_source import (
    inspect_forward,
    undecorated_forward,
)
from rope_patch.patching.architecture.mla_scale import base_softmax_scale
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_owner
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.method_wrappers import method_origin
from rope_patch.patching.restoration import lost_patched_buffers, lost_softmax_scales
from rope_patch.pretrained.adapters import require_same_rotation
from rope_patch.pretrained.sidecar import SIDECAR, describe_outside, is_missing, sidecar_target
from rope_patch.transformers_api.models import APPLY_ROTATION
from rope_patch.utils.errors import Refused

# Functions that other libraries replace: in most files, in Qwen 2 VL's, in Llama 4's.
_ROTATION_FUNCTIONS = (APPLY_ROTATION, "apply_multimodal_rotary_pos_emb", "apply_rotary_emb")

# Rope types whose modules change their buffer during forward.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def live_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about a live model."""
    subject = facts.subject
    if not subject.live:
        return
    if subject.handle is None:
        for rotary in subject.rotaries:
            yield from _check_buffers(facts, rotary)
            yield from _raised_max_positions_finding(facts, rotary)
    yield from patched_findings(facts)
    yield from softmax_scale_finding(facts)
    yield from _replaced_function_finding(facts)


def _check_buffers(facts: Facts, rotary: RotaryModule) -> Iterator[Finding]:
    module: Any = rotary.module
    assert facts.subject.model is not None
    if not RotaryTraits.of(facts.subject.model, rotary, facts.subject.config).is_buffer_used:
        return  # what the buffers hold acts on nothing
    for layer_type, prefix in rotary.prefixes.items():
        layer = facts.layers.get(layer_type)
        if layer is None or layer.actual is None:
            continue
        built_rope_type = (
            module.rope_type[layer_type] if isinstance(module.rope_type, dict) else module.rope_type
        )
        name = f"{prefix}inv_freq"
        if (
            built_rope_type in _LENGTH_DEPENDENT
            and getattr(module, f"{prefix}original_inv_freq", None) is not None
        ):
            name = f"{prefix}original_inv_freq"
        buffer = getattr(module, name)
        cast = None if buffer.is_meta else _dtype_it_was_cast_to(buffer, layer.actual)
        weighted = has_weights(facts.subject.model)
        if cast is None and (
            problem := loss_of_frequencies(rotary, prefix, layer, has_weights=weighted)
        ):
            in_use = getattr(module, f"{prefix}inv_freq")
            yield uninitialised_finding(layer_type, problem, live=in_use)
            continue
        if buffer.is_meta:
            continue
        live = Frequencies(buffer.double().cpu(), _attention_factor(module, prefix))
        if built_rope_type == layer.scaling and live.close_to(layer.actual):
            continue
        if cast is not None and built_rope_type == layer.scaling:
            yield _cast_finding(facts, layer_type, cast, live, layer.actual)
        elif problem := _overwritten(module, prefix, name, str(built_rope_type), live, layer):
            yield _overwritten_finding(layer_type, problem, live, layer.actual)
        else:
            yield _edited_config_finding(
                facts, layer_type, str(built_rope_type), live, layer.actual
            )


def _overwritten(
    module: Any, prefix: str, name: str, built: str, live: Frequencies, layer: LayerFacts
) -> str | None:
    """Return what was written over a module's rotation; None if its config may have changed."""
    exact = layer.actual
    assert exact is not None
    if built != layer.scaling:
        return None
    # transformers keeps a second copy of what it computed when it built the module. Where one of
    # the two fits the config, the config is as it was.
    other = "inv_freq" if name.endswith("original_inv_freq") else "original_inv_freq"
    copy = getattr(module, f"{prefix}{other}", None)
    as_built = isinstance(copy, torch.Tensor) and Frequencies(
        copy.double().cpu(), exact.attention_factor
    ).close_to(exact)
    same = Frequencies(live.inv_freq, exact.attention_factor).close_to(exact)
    if same and built == "default":
        return f"{prefix}attention_scaling is {live.attention_factor:.6g}"
    if same or not as_built:
        return None
    return f"{name} holds {_likeness(live.inv_freq, layer)}"


def _likeness(values: torch.Tensor, layer: LayerFacts) -> str:
    """Return in words which frequencies a buffer holds."""
    exact = layer.actual
    assert exact is not None
    if values.shape != exact.inv_freq.shape:
        return f"{len(values)} frequencies instead of {len(exact.inv_freq)}"
    rotating = exact.inv_freq > 0
    ratios = values[rotating] / exact.inv_freq[rotating]
    if len(ratios) and torch.allclose(ratios, ratios[0], rtol=1e-5):
        return f"the config's frequencies, all times {float(ratios[0]):.6g}"
    theta = _theta_of(values)
    return "other frequencies" if theta is None else f"the frequencies of theta {theta:,.6g}"


def _theta_of(values: torch.Tensor) -> float | None:
    """Return the theta whose unscaled frequencies these are, also rounded ones; else None."""
    count = len(values)
    if count < 3 or not bool((values > 0).all()):
        return None
    theta = float(values[0] / values[-1]) ** (count / (count - 1))
    exact = theta ** (-torch.arange(count, dtype=torch.float64) / count)
    for dtype, tolerance, digits in (
        (torch.float32, 1e-5, 6),
        (torch.float16, 2**-10, 3),
        (torch.bfloat16, 2**-7, 2),
    ):
        is_rounded = torch.equal(values, values.to(dtype).double())
        if is_rounded and torch.allclose(values, exact, rtol=tolerance, atol=0):
            return float(f"{theta:.{digits}g}")
    return None


def _overwritten_finding(
    layer_type: str | None, problem: str, live: Frequencies, exact: Frequencies
) -> Finding:
    changed, ratio = len(exact.inv_freq), math.inf
    if live.inv_freq.shape == exact.inv_freq.shape:
        changed, ratio = frequency_difference(live, exact)
    return Finding(
        "error",
        "frequencies-overwritten",
        "the model's rotation was overwritten after it was built; its config is as it was",
        f"{problem}: {changed} of {len(exact.inv_freq)} pairs differ"
        + (f", by up to a factor of {ratio:.6g}" if changed and math.isfinite(ratio) else ""),
        "rope_patch.restore(model)",
        layer_type,
        {"pairs": len(live.inv_freq), "changed": changed, "ratio": ratio},
    )


def _attention_factor(module: Any, prefix: str) -> float:
    return float(getattr(module, f"{prefix}attention_scaling"))


def _dtype_it_was_cast_to(buffer: torch.Tensor, exact: Frequencies) -> torch.dtype | None:
    """Return the dtype that exact frequencies were cast to, if nothing else changed them."""
    if buffer.shape != exact.inv_freq.shape:
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        cast = exact.inv_freq.float().to(dtype).double()
        if torch.allclose(buffer.double().cpu(), cast, rtol=1e-6, atol=0):
            return dtype
    return None


def _cast_finding(
    facts: Facts, layer_type: str | None, cast: torch.dtype, live: Frequencies, exact: Frequencies
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
        "cast afterwards; rope_patch.restore(model) makes them exact, too",
        layer_type,
        {"length": length, "pair": pair, "radians": error * (length - 1), "cos": worst},
    )


def _edited_config_finding(
    facts: Facts,
    layer_type: str | None,
    built_rope_type: str,
    live: Frequencies,
    exact: Frequencies,
) -> Finding:
    layer = facts.layers[layer_type]
    if live.inv_freq.shape == exact.inv_freq.shape:
        count, farthest = frequency_difference(live, exact)
        evidence = f"{count} of {len(live.inv_freq)} pairs differ"
        if count:
            evidence += f", by up to a factor of {farthest:.6g}"
    else:
        count, farthest = len(exact.inv_freq), math.inf
        evidence = f"{len(live.inv_freq)} pairs turn instead of {len(exact.inv_freq)}"
    if abs(live.attention_factor - exact.attention_factor) > 1e-6:
        evidence += (
            f"; attention factor {live.attention_factor:.6g} instead of "
            f"{exact.attention_factor:.6g}"
        )
    source = repr(facts.subject.path) if facts.subject.path else "path"
    return Finding(
        "error",
        "config-edited-after-load",
        f"the model runs with {built_rope_type!r} as it was built, and its config says "
        f"{layer.scaling!r} "
        "now: edits after loading do nothing"
        if built_rope_type != layer.scaling
        else f"the model's frequencies are not those of its config's {layer.scaling!r}: the "
        "config was edited after loading, or all of the module's copies were overwritten",
        evidence,
        f"model = AutoModelForCausalLM.from_pretrained({source}, config=model.config), which "
        "builds what the config says; rope_patch.restore(model) does so in place",
        layer_type,
        {"pairs": len(live.inv_freq), "changed": count, "ratio": farthest},
    )


def _raised_max_positions_finding(facts: Facts, rotary: RotaryModule) -> Iterator[Finding]:
    """Yield a finding if max_position_embeddings was edited on the live model."""
    built_length = getattr(rotary.module, "original_max_seq_len", None)
    now = facts.subject.config.max_position_embeddings
    if not isinstance(built_length, int) or not isinstance(now, int) or built_length == now:
        return
    dynamic = any(layer.scaling == "dynamic" for layer in facts.layers.values())
    yield Finding(
        "error",
        "length-edited-after-load",
        f"max_position_embeddings was {built_length:,} when the model was built and is {now:,} "
        "now: "
        + (
            "its dynamic scaling counts from the one in some places and from the other elsewhere"
            if dynamic
            else "the rotation is as before"
        ),
        f"0 of {facts.layers[next(iter(facts.layers))].geometry.rotary_dim // 2} pairs stretched "
        f"for a length {now / built_length:g} times the one it was built for",
        f"model.config.max_position_embeddings = {built_length}, then "
        f"{facts.subject.patch_call('yarn', f'length={now}')}"
        if now > built_length
        else f"model.config.max_position_embeddings = {built_length}",
        numbers={"built": built_length, "now": now},
    )


def _replaced_function_finding(facts: Facts) -> Iterator[Finding]:
    """Yield findings for rotation functions that another library replaced in the process."""
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
            replacement = getattr(place, function, None)
            origin = _defining_module(replacement)
            if (name, function) in seen or origin in (None, name) or _is_expected_module(origin):
                continue
            seen.add((name, function))
            difference = (
                _max_rotation_difference(place, replacement) if function == APPLY_ROTATION else None
            )
            yield Finding(
                "warning",
                "rotation-replaced",
                f"{function} of {name} is not transformers' own but {origin}'s, for every model "
                "of this process",
                "on random vectors it "
                + (
                    "could not be tried here"
                    if difference is None
                    else f"differs from transformers' own by at most {difference:.3g}"
                )
                + "; it is given cos and sin, so frequencies act",
                "leave it out where rotations are to be exact (Liger: rope=False), and start the "
                "process again: it was replaced in the module",
                numbers={} if difference is None else {"difference": difference},
            )


def _defining_module(function: Any) -> str | None:
    function = getattr(function, "forward", function)  # with `kernels` installed it is a module
    try:
        return inspect.unwrap(function).__module__
    except (AttributeError, ValueError):
        return None


def _is_expected_module(module_name: str | None) -> bool:
    return bool(module_name) and str(module_name).split(".")[0] in (
        "transformers",
        "kernels",
        "rope_patch",
    )


def _max_rotation_difference(home: Any, replacement: Any) -> float | None:
    """Return the largest difference of two rotations of random vectors; None if one fails."""
    try:
        spec = importlib.util.find_spec(home.__name__)
        fresh_module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(fresh_module)  # type: ignore[union-attr]
        original: Any = getattr(fresh_module, APPLY_ROTATION)
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 2, 8, 16, generator=generator)
        angles = torch.outer(torch.arange(8.0), 1e4 ** -torch.arange(0, 1, 1 / 8))
        angles = torch.cat([angles, angles], dim=-1)[None]
        expected = original(q.clone(), k.clone(), angles.cos(), angles.sin())
        got = replacement(q.clone(), k.clone(), angles.cos(), angles.sin())
        return max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
    except Exception:  # foreign code, possibly made for another device
        return None


# Frequencies of pairs that rotate lie far above: 1e-20 is theta 1e20 without any scaling.
_SMALLEST = 1e-20
# Factors within which frequencies may exceed 1, and exceed the pair before (LongRoPE's factors).
_LARGEST, _ASCENT = 1.01, 4.0


def loss_of_frequencies(
    rotary: RotaryModule, prefix: str, layer: LayerFacts, *, has_weights: bool
) -> str | None:
    """Return in which way a buffer's frequencies were never computed; None if they were.

    Args:
        rotary: The rotary module.
        prefix: The layer type's prefix within the module.
        layer: Facts about the layer type, with its actual frequencies.
        has_weights: Whether the model's weights have memory.
    """
    assert layer.actual is not None
    module: Any = rotary.module
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        buffer = getattr(module, name, None)
        if not isinstance(buffer, torch.Tensor):
            continue
        if buffer.is_meta:
            if has_weights:
                return "they have no memory (meta), though the weights have"
            continue
        values, expected = buffer.detach().double().cpu(), layer.actual.inv_freq
        if values.shape == expected.shape and torch.allclose(values, expected, rtol=2e-6, atol=0):
            continue  # transformers computes the same, however odd the config's factors
        if problem := _impossible_values(values, expected):
            return f"{problem} in {name}"
    if _lacks_scaling(module, prefix, layer):
        return f"they are the plain ones: nothing scales them as the config's {layer.scaling!r}"
    return None


def _impossible_values(values: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return why values cannot be frequencies of any rotation; None if they can."""
    if values.shape != expected.shape:
        return None
    stray = int((~values.isfinite()).sum())
    if stray:
        return f"{stray} of {len(values)} are NaN or infinite"
    rotates = expected > 0
    if not values[rotates].any():
        return "all are zero"
    limit = _LARGEST * max(1.0, float(expected.max()))
    stray = int(((values < 0) | (values > limit) | (rotates & (values < _SMALLEST))).sum())
    if stray:
        return f"{stray} of {len(values)} are zero, negative or above {limit:.3g}"
    rotating = values[rotates]
    ascents = int((rotating[1:] > _ASCENT * rotating[:-1]).sum())
    return f"{ascents} of {len(values)} are far faster than the pair before" if ascents else None


def _lacks_scaling(module: Any, prefix: str, layer: LayerFacts) -> bool:
    """Return whether a module that was built for a scaling holds the unscaled frequencies."""
    built = module.rope_type[layer.layer_type] if prefix else module.rope_type
    live, plain = getattr(module, f"{prefix}inv_freq"), layer.geometry.unscaled_inv_freq()
    if built != layer.scaling or layer.scaling in ("default", "dynamic") or live.is_meta:
        return False
    assert layer.actual is not None
    return (
        live.shape == plain.shape
        and not torch.allclose(plain, layer.actual.inv_freq, rtol=1e-5, atol=0)
        and torch.allclose(live.double().cpu(), plain, rtol=2e-6, atol=0)
    )


def uninitialised_finding(layer_type: str | None, problem: str, *, live: Any = None) -> Finding:
    """Return the finding for frequencies that were never computed.

    Args:
        layer_type: The layer type.
        problem: In which way; see `loss_of_frequencies`.
        live: The buffer, if it has values.
    """
    numbers = {}
    if live is not None and not live.is_meta:
        finite = live.double()[live.double().isfinite()]
        numbers = {
            "pairs": len(live),
            "zeros": int((live == 0).sum()),
            "largest": float(finite.abs().max()) if len(finite) else math.inf,
        }
    return Finding(
        "error",
        "frequencies-not-initialised",
        "the frequencies that the model rotates by were never computed: they are in no checkpoint, "
        "and code that gives a model of meta its memory has to compute them anew",
        problem,
        "rope_patch.restore(model)",
        layer_type,
        numbers,
    )


def patched_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about buffers that lost the frequencies of an active patch."""
    subject = facts.subject
    if not subject.live or subject.handle is None or subject.model is None:
        return
    for rotary, name in lost_patched_buffers(subject.model, subject.handle):
        layer_type = next(key for key, p in rotary.prefixes.items() if f"{p}inv_freq" == name)
        problem = f"{name} does not hold the frequencies of {subject.handle}"
        yield uninitialised_finding(layer_type, problem, live=getattr(rotary.module, name))


def softmax_scale_finding(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if latent attentions lack the attention factor in their softmax scale."""
    subject = facts.subject
    if not subject.live or subject.model is None:
        return
    lost = list(lost_softmax_scales(subject.model, subject.handle))
    if not lost:
        return
    first = lost[0]
    base = base_softmax_scale(first.attention)
    of = f"{subject.handle}" if subject.handle else "the config"
    yield Finding(
        "error",
        "softmax-scale-lost",
        f"the softmax scale of {len(lost)} latent attention{'s' if len(lost) > 1 else ''} is not "
        f"that of {of}"
        + (
            ": the attention factor, which it holds squared (mscale), was lost"
            if math.isclose(first.present, base, rel_tol=1e-6)
            else ""
        ),
        f"{first.name}.scaling is {first.present:.6g} instead of {first.expected:.6g}: logits of "
        f"its attention are {first.present / first.expected:.4g} times what they should be",
        "rope_patch.restore(model)",
        numbers={"attentions": len(lost), "ratio": first.present / first.expected},
    )


def has_weights(model: Any) -> bool:
    """Return whether any of a model's weights has memory."""
    return any(not parameter.is_meta for parameter in model.parameters())


def outside_method_findings(facts: Facts, method: Method | None) -> Iterator[Finding]:
    """Yield a note for each method from outside: of the model's patch, its folder, the request.

    Args:
        facts: The model.
        method: The method to diagnose, or None.
    """
    handle, sidecar = facts.subject.handle, facts.subject.sidecar
    patched = None if handle is None else handle.method
    for whose, each in (("the model's patch", patched), ("the request", method)):
        origin = None if each is None else method_origin(each)
        if each is not None and origin is not None:
            yield Finding(
                "note",
                "method-from-outside",
                f"{whose} has the method {each.name!r}, which is not rope_patch's",
                f"it is of {origin}",
            )
    if sidecar is not None and (origin_text := describe_outside(sidecar)):
        missing = is_missing(sidecar)
        yield Finding(
            "note",
            "method-from-outside",
            f"the folder was saved with the method {sidecar['method']!r}, which is not rope_patch's"
            + (" and not loaded here" if missing else ""),
            f"rope_patch.json says that it was of {origin_text}",
            "load its plugin to use the method itself; without, rope_patch.load takes the recorded "
            "frequencies"
            if missing
            else "",
        )


def adapter_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about an adapter's folder, a live model's adapters, or a saved folder."""
    subject = facts.subject
    if subject.adapter:
        yield from _adapter_folder_findings(facts)
    elif subject.sidecar is not None:
        yield from _saved_folder_findings(facts, subject.sidecar)
    for name, config in (getattr(subject.model, "peft_config", None) or {}).items():
        adapter_type = getattr(getattr(config, "peft_type", None), "value", "adapter")
        yield Finding(
            "note",
            "adapter-says-nothing",
            f"the adapter {name!r} ({adapter_type}) does not say under which rotation it was "
            "trained",
            "PEFT's config has no field about the rotation; the model below rotates "
            + (f"as it is patched, {subject.handle}" if subject.handle else "as its config says"),
            f"if {SIDECAR} lies in its folder, rope_patch.load(folder) rotates the base as in "
            "training; rope_patch.save(model, folder) writes it for a patched model",
        )


def _adapter_folder_findings(facts: Facts) -> Iterator[Finding]:
    subject, sidecar = facts.subject, facts.subject.sidecar
    if sidecar is None:
        rotation_keys = sorted(key for key in subject.adapter if "rope" in key or "position" in key)
        scalings = ", ".join(sorted({layer.scaling for layer in facts.layers.values()}))
        yield Finding(
            "warning",
            "adapter-says-nothing",
            f"the adapter does not say under which rotation it was trained: no {SIDECAR} is beside "
            "it",
            f"adapter_config.json has {len(subject.adapter)} fields, {len(rotation_keys)} of "
            "them about "
            f"the rotation; its base, {subject.path}, rotates as {scalings!r} up to "
            f"{facts.promised_length:,} tokens",
            "if it was trained on an extended model, extend the base in the same way: "
            'rope_patch.patch(base, ...), then rope_patch.load_adapter(base, "...")',
            numbers={"fields": len(subject.adapter), "about_rotation": len(rotation_keys)},
        )
        return
    trained = f"{sidecar['method']!r} from {sidecar['trained_length']:,} tokens"
    try:
        is_unpatched = subject.model and require_same_rotation(subject.model, subject.adapter_path)
    except Refused as error:
        yield Finding(
            "error",
            "adapter-on-another-base",
            "the adapter was trained under another rotation than its base can be given",
            str(error),
            "give the base that it was trained on",
        )
        return
    if is_unpatched:
        yield Finding(
            "warning",
            "adapter-trained-patched",
            f"the adapter was trained under {trained}; PEFT alone puts it on a base that rotates "
            "as before",
            f"{SIDECAR} records {_sidecar_frequencies(sidecar)}",
            f"model = rope_patch.load({subject.adapter_path!r}), or rope_patch.load_adapter(base, "
            f"{subject.adapter_path!r})",
        )


def _saved_folder_findings(facts: Facts, sidecar: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding if a folder written by rope_patch.save needs rope_patch to load."""
    if sidecar.get("native", True):
        return
    yield Finding(
        "warning",
        "needs-rope-patch",
        f"the folder was saved with {sidecar['method']!r}, which no config of transformers can "
        "say: plain transformers loads the model without it",
        f"{SIDECAR} records {_sidecar_frequencies(sidecar)}, native: false",
        f"model = rope_patch.load({facts.subject.path!r})",
    )


def _sidecar_frequencies(sidecar: dict[str, Any]) -> str:
    length = sidecar_target(sidecar)
    reached = f"{length:,} tokens" if isinstance(length, int) else "any length"
    return f"{sidecar['method']}, {sidecar['trained_length']:,} → {reached}"
