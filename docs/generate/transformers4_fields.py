"""Add transformers 4 to rope_patch/exporting/engine_fields.json, by running its models.

`python docs/generate/transformers4_fields.py PYTHON`, where PYTHON belongs to an environment with
transformers 4 and torch. Every tiny architecture is patched here by each of several methods and
exported; transformers 4 builds the model from the exported config, and its rotation must be the
patched model's. What differs or fails is printed, and the table leaves it out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "rope_patch" / "exporting" / "engine_fields.json"
READER = Path(__file__).with_name("transformers4_reader.py")
ENGINE = "transformers4"

_UNSCALED: dict[str, dict[str, Any]] = {"ntk": {}, "abf": {}}
_SCALED: dict[str, dict[str, Any]] = {
    "linear": {},
    "yarn": {},
    "yarn 1.3": {"attention_factor": 1.3},
    "llama3": {},
    "longrope": {},
    "proportional": {"partial_rotary_factor": 0.71},
}


def export_rows() -> list[dict[str, Any]]:
    """Return config, exported fields and rotation of every architecture and method."""
    sys.path.insert(0, str(ROOT / "tests"))
    from architectures.tiny_architectures import mentions_rotation, model_types, tiny_model

    rows = []
    for model_type in filter(mentions_rotation, model_types()):
        for name, options in (_UNSCALED | _SCALED).items():
            with suppress(Exception):  # an architecture that this environment cannot build
                model = tiny_model(model_type)
                if (row := _export_row(model, name.split()[0], dict(options))) is not None:
                    rows.append({"model_type": model_type, "method": name, **row})
    return rows


def _export_row(model: Any, method: str, options: dict[str, Any]) -> dict[str, Any] | None:
    import rope_patch
    from rope_patch.patching.architecture.rotary_modules import find_rotaries
    from rope_patch.patching.architecture.rotary_traits import RotaryTraits
    from rope_patch.utils.errors import Refused

    config = json.loads(model.config.to_json_string(use_diff=False))
    scales = _softmax_scales(model)
    if method == "longrope":
        rotary = find_rotaries(model)[0]
        traits = RotaryTraits.of(model, rotary, rotary.module.config)
        pairs = len(next(iter(traits.frequencies.values())).inv_freq)
        stretches = [1 + 3 * pair / pairs for pair in range(pairs)]
        options |= {"long_factor": stretches, "short_factor": stretches}
    try:
        handle = rope_patch.patch(model, method, factor=4.0, kernels="hf", **options)
        # The table is what this run is to write.
        with mock.patch("rope_patch.exporting.transformers.require_fields_are_read"):
            fields = rope_patch.export(model, ENGINE).config
    except Refused:
        return None
    return {
        "config": config,
        "fields": fields,
        "softmax_scale": scales[0] * handle.softmax_mscale**2 if scales else None,
        "rotations": {
            layer_type or "": (frequencies.inv_freq.tolist(), frequencies.attention_factor)
            for layer_type, frequencies in handle.frequencies.items()
        },
    }


def _softmax_scales(model: Any) -> list[float]:
    return [
        module.scaling
        for name, module in model.named_modules()
        if name.endswith("self_attn") and isinstance(getattr(module, "scaling", None), float)
    ]


def main() -> int:
    """Run both sides and write the table."""
    rows = export_rows()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        command = [sys.argv[1], str(READER), str(path)]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    outcomes: dict[str, dict[str, str]] = {}
    text_types = {
        row["model_type"]: row["config"]["text_config"]["model_type"]
        for row in rows
        if "text_config" in row["config"]
    }
    for row, outcome in zip(rows, answer["outcomes"], strict=True):
        outcomes.setdefault(row["model_type"], {})[row["method"]] = outcome
        if outcome != "equal":
            print(row["model_type"], row["method"], outcome)
    reads: dict[str, set[str]] = {"scaling": set(), "theta": set()}
    for model_type, by_method in outcomes.items():
        unscaled = [o for m, o in by_method.items() if m in _UNSCALED]
        scaled = [o for m, o in by_method.items() if m in _SCALED]
        if unscaled and {*unscaled} == {"equal"}:
            names = {model_type, text_types.get(model_type, model_type)}
            reads["scaling" if {*scaled} <= {"equal"} else "theta"] |= names
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table[ENGINE] = {"version": answer["version"], **{k: sorted(v) for k, v in reads.items()}}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
