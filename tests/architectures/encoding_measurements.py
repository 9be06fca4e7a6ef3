"""Measure what extending a tiny random model does, for every encoding of positions."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from architectures.text_models import text_output, tiny_text_model
from architectures.tiny_architectures import TRAINED
from helpers.rotary_modules import find_rotaries

import rope_patch
from rope_patch import Extension
from rope_patch.entry_points import check_encoding

FACTOR = 2
SHORT = 40
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
    except Exception as error:
        return EncodingRow("", "", "", f"not built: {_reason(error)}")
    try:
        before, failure = text_output(model, SHORT), ""
    except Exception as error:  # its input is no text, or its sizes do not fit
        before, failure = None, f"not built: {_reason(error)}"
    if find_rotaries(model) and not getattr(model.config, "alibi", False):
        return EncodingRow("rotary", "", "", failure) if failure else _rotary(model, before)
    try:
        requests = _requests(model)
    except ValueError as error:
        assert before is None or torch.equal(text_output(model, SHORT), before)
        reason = _reason(error)
        kind = "none" if "showed no rotation" in reason or "recurrence alone" in reason else ""
        return EncodingRow(kind, "", "", f"refused: {reason}")
    if failure:
        return EncodingRow("", "", "", failure)
    config = model.config.to_dict()
    kinds, parts = [], []
    for request in requests:
        with rope_patch.patch(model, request) as handle:
            kinds += [NAMES.get(site.kind, site.kind) for site in handle.sites]
            parts += [site.part for site in handle.sites]
            _assert_effect(model_type, model, handle)
        assert torch.equal(text_output(model, SHORT), before)
        assert model.config.to_dict() == config
    names = " and ".join(sorted(set(parts), reverse=True))
    methods = dict.fromkeys(request.method for request in requests)
    return EncodingRow(
        ", ".join(dict.fromkeys(kinds)),
        ", ".join(methods),
        names if model.config.is_encoder_decoder else "",
        "extended",
    )


def _requests(model: Any) -> list[Extension]:
    """Return the requests that extend a model: one, or one for each part."""
    requests = []
    for part in _parts(model):
        stated = None
        try:
            plan = check_encoding(model, Extension("linear", factor=FACTOR, layer_types=part))
        except ValueError as error:
            if "name them" not in str(error):
                raise
            stated = TRAINED
            trial = Extension("linear", factor=FACTOR, trained_length=stated, layer_types=part)
            plan = check_encoding(model, trial)
        assert plan is not None
        method = METHODS.get(plan.sites[0].kind, "linear")
        if method == "log-tail":
            stated = TRAINED
        requests.append(Extension(method, factor=FACTOR, trained_length=stated, layer_types=part))
    return requests


def _parts(model: Any) -> list[list[str] | None]:
    """Return what is extended at a time: everything, unless the lengths differ."""
    try:
        check_encoding(model, Extension("linear", factor=FACTOR))
    except ValueError as error:
        if "layer_types=[" in str(error):
            return [["encoder"], ["decoder"]]
    return [None]


def _assert_effect(model_type: str, model: Any, handle: Any) -> None:
    """Check a text of twice the length, and tables against ones that are made in another way."""
    trained, plan = handle.trained_length, handle._plan
    length = FACTOR * trained
    long = text_output(model, length)
    assert long.isfinite().all()
    if plan.sites[0].kind in METHODS:
        handle.undo()
        if model_type != "mpt":  # it cannot read that
            assert (text_output(model, length) - long).abs().max() > 1e-6
        handle.apply()
        return
    new = [site.table[site.detected.first_row :].double().numpy() for site in plan.sites]
    built = tiny_text_model(model_type, **plan.config_fields)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    handle.undo()
    own = dict(model.named_parameters())
    names = {name: site for site in plan.sites for name, p in own.items() if p is site.table}
    for site, table in zip(plan.sites, new, strict=True):
        old, first = site.table.double().numpy(), site.detected.first_row
        if site.kind == "sinusoidal":  # every other position is one that it had
            halves = table[:length:FACTOR]
            np.testing.assert_allclose(halves, old[first : first + trained], atol=2e-4)
    for name, site in names.items():
        old, first = site.table.double().numpy(), site.detected.first_row
        if site.kind == "learned":
            rows, used = np.arange(length) / FACTOR, old[first : first + trained]
            columns = [np.interp(rows, np.arange(trained), column) for column in used.T]
            longer = np.concatenate([old[:first], np.stack(columns, 1)])
            state[name] = torch.tensor(longer, dtype=torch.float32)
    handle.apply()
    if all(site.kind == "learned" for site in plan.sites):
        built.load_state_dict(state)
        torch.testing.assert_close(text_output(built, length), long, rtol=1e-4, atol=1e-4)


def _rotary(model: Any, before: torch.Tensor) -> EncodingRow:
    try:
        handle = rope_patch.patch(model, "linear", factor=FACTOR)
    except ValueError as error:
        return EncodingRow("rotary", "", "", f"refused: {_reason(error)}")
    assert text_output(model, FACTOR * TRAINED).isfinite().all()
    assert not torch.equal(text_output(model, SHORT), before)
    handle.undo()
    assert torch.equal(text_output(model, SHORT), before)
    return EncodingRow("rotary", "linear", "", "extended")


def _reason(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__).strip()
