"""Write what all model cards share: the hub's header, how to load the model, what made it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rope_patch.pretrained import demo
from rope_patch.utils.errors import escape_markdown, markdown_code
from rope_patch.utils.provenance import versions


def card_header(model: str, method: str, evaluations: Sequence[EvalResult] = ()) -> str:
    """Return a card's YAML header, which the hub reads, with results in its `model-index`.

    Args:
        model: The original model, which the hub links if it has one of this name: a name, a folder
            or "demo".
        method: The method's name.
        evaluations: What was measured; without any, there is no `model-index`.
    """
    on_hub = model != "demo" and not Path(model).exists()
    data = ModelCardData(
        base_model=model if on_hub else None,
        library_name="transformers",
        tags=["rope_patch", "long-context", method],
        model_name=(demo.NAME if model == "demo" else Path(model).name) if evaluations else None,
        eval_results=list(evaluations) or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def card_title(model: str) -> str:
    """Return a model's name as Markdown: that of the demo's weights, or the last part of a path."""
    return escape_markdown(demo.NAME if model == "demo" else Path(model).name)


def loading_snippet(sidecar: dict[str, Any] | None) -> str:
    """Return the line that loads a model, as a block of code.

    Args:
        sidecar: The model's sidecar, if it has one.
    """
    if sidecar is None or sidecar["native"]:
        code = 'transformers.AutoModelForCausalLM.from_pretrained("...")'
        return f"```python\nmodel = {code}  # rope_patch is not needed\n```"
    return (
        '```python\nmodel = rope_patch.load("...")  # transformers has no form of this method\n```'
    )


def made_by(command: str) -> str:
    """Return a sentence that names the command and the versions that made a model."""
    installed = versions()
    return (
        f"Made by {markdown_code(command)} with rope_patch {installed['rope_patch']}, transformers "
        f"{installed['transformers']}, torch {installed['torch']}."
    )
