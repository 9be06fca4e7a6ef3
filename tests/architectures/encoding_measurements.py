"""Measure what extending a tiny random model does, for every encoding of positions."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from architectures.text_models import text_output, tiny_text_model
from architectures.tiny_architectures import TRAINED

import rope_patch
from rope_patch.extension import Extension
from rope_patch.patching.architecture.rotary_modules import rotation_refusal
from rope_patch.patching.entry_points import check_encoding

FACTOR = 2
SHORT, LONG = 40, FACTOR * TRAINED
NAMES = {"alibi": "ALiBi", "t5": "T5"}
# What to extend each encoding by; tables have no better one.
METHODS = {"alibi": "ntk", "t5": "log-tail"}


@dataclass(frozen=True)
class EncodingRow:
    """One architecture's row of the table.

    Attributes:
        encoding: Its encodings; empty if it is refused.
        method: What extended it.
        parts: "encoder", "decoder" or both, where it has an encoder.
        result: "extended", or why not.
    """

    encoding: str
    method: str
    parts: str
    result: str

    def to_dict(self) -> dict[str, str]:
        """Return the row as plain data."""
        return asdict(self)


def measure_encoding(model_type: str) -> EncodingRow:
    """Build a model, extend it, and check the effect and the undoing.

    Raises:
        AssertionError: An accepted patch has a wrong effect.
    """
    try:
        model = tiny_text_model(model_type)
        before = text_output(model, SHORT)
    except Exception as error:
        return EncodingRow("", "", "", f"not built: {_reason(error)}")
    if rotation_refusal(model) is None:
        return _rotary(model, before)
    try:
        requests = _requests(model)
    except ValueError as error:
        assert torch.equal(text_output(model, SHORT), before)
        reason = _reason(error)
        kind = "none" if "showed no rotation" in reason or "recurrence alone" in reason else ""
        return EncodingRow(kind, "", "", f"refused: {reason}")
    config = model.config.to_dict()
    kinds, parts = [], []
    for request in requests:
        with rope_patch.patch(model, request) as handle:
            sites = handle.sites
            kinds += [NAMES.get(site.kind, site.kind) for site in sites]
            parts += [site.part for site in sites]
            long = text_output(model, LONG)
            _assert_effect(model_type, model, handle, long)
        assert torch.equal(text_output(model, SHORT), before)
        assert model.config.to_dict() == config
    names = " and ".join(sorted(set(parts))) if model.config.is_encoder_decoder else ""
    methods = dict.fromkeys(request.method for request in requests)
    return EncodingRow(", ".join(dict.fromkeys(kinds)), ", ".join(methods), names, "extended")


def _requests(model: Any) -> list[Extension]:
    """Return the requests that extend a model: one, or one for each part."""
    parts: list[list[str] | None] = [None]
    requests = []
    try:
        check_encoding(model, Extension("linear", factor=FACTOR, trained_length=TRAINED))
    except ValueError as error:
        if "layer_types" not in str(error):
            raise
        parts = [["encoder"], ["decoder"]]
    for part in parts:
        trial = Extension("linear", factor=FACTOR, trained_length=TRAINED, layer_types=part)
        plan = check_encoding(model, trial)
        assert plan is not None
        kind = plan.sites[0].kind
        stated = None not in [site.trained_length(plan.model.config) for site in plan.sites]
        requests.append(
            Extension(
                METHODS.get(kind, "linear"),
                factor=FACTOR,
                trained_length=None if stated and kind not in METHODS else TRAINED,
                layer_types=part,
            )
        )
    return requests


def _assert_effect(model_type: str, model: Any, handle: Any, long: torch.Tensor) -> None:
    """Check a text of twice the length, and tables against ones that are made in another way."""
    assert long.isfinite().all()
    plan = handle._plan
    if plan.sites[0].kind in METHODS:
        handle.undo()
        plain = text_output(model, LONG) if model_type != "mpt" else None  # it cannot read that
        handle.apply()
        assert plain is None or (plain - long).abs().max() > 1e-6
        return
    for site in plan.sites:
        first = site.sighting.first_row
        table = site.table[first:].double().numpy()
        assert len(table) >= LONG
        if site.kind == "sinusoidal":  # every other position is one that it had
            handle.undo()
            old = site.table[first:].double().numpy()
            handle.apply()
            np.testing.assert_allclose(table[: 2 * len(old) : 2], old, atol=2e-4)
    if all(site.kind == "learned" for site in plan.sites):
        built = tiny_text_model(model_type, **plan.config_fields)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        handle.undo()
        originals = dict(model.named_parameters())
        for site in plan.sites:
            name = next(n for n, p in originals.items() if p is site.table)
            old, first = site.table.double().numpy(), site.sighting.first_row
            used = old[first : first + TRAINED] if model_type != "" else old
            rows = np.arange(len(used) * FACTOR) / FACTOR
            columns = [np.interp(rows, np.arange(len(used)), column) for column in used.T]
            longer = np.concatenate([old[:first], np.stack(columns, 1)])
            state[name] = torch.tensor(longer, dtype=torch.float32)
        handle.apply()
        built.load_state_dict(state)
        torch.testing.assert_close(text_output(built, LONG), long, rtol=1e-4, atol=1e-4)


def _rotary(model: Any, before: torch.Tensor) -> EncodingRow:
    try:
        handle = rope_patch.patch(model, "linear", factor=FACTOR)
    except ValueError as error:
        return EncodingRow("rotary", "", "", f"refused: {_reason(error)}")
    assert text_output(model, LONG).isfinite().all()
    assert not torch.equal(text_output(model, SHORT), before)
    handle.undo()
    assert torch.equal(text_output(model, SHORT), before)
    return EncodingRow("rotary", "linear", "", "extended")


def _reason(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__).strip()
