"""The command `env`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from rope_patch.cli import options
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import VERDICT

# Without a MODEL, configs of these classes are proven: plain, with norms, with windows.
_CONFIGS = ("LlamaConfig", "Qwen3Config", "Gemma3TextConfig")


def env(
    model: str | None = argument(None, f"With --check: {options.MODEL}"),
    check: bool = option(
        False,
        "Prove all kinds of methods on a tiny model of MODEL's class, or of Llama's, Qwen3's and "
        "Gemma 3's, and test the kernels where there is a GPU; the exit code is 1 if something is "
        "wrong or cannot be proven.",
        "--check",
    ),
    as_json: options.Json = False,
) -> None:
    """Show versions and hardware, for a bug report, and whether patches are right on them.

    Also shows the cache folder, where the demo's weights and passed proofs are, and its size.
    --check reads MODEL's config, and no weights: a tiny model of random weights shows whether
    cached steps, chunks and padded rows equal one pass, whether foreign caches are refused, and
    whether undoing restores the bits.

    \b
    Examples:
      rope-patch env
      rope-patch env --check
      rope-patch env --check Qwen/Qwen3-8B --json
    """
    if model is not None and not check:
        raise ValueError(f"env takes a MODEL with --check alone: rope-patch env --check {model}")
    facts = _facts()
    if not check:
        print(json.dumps(facts, indent=1) if as_json else _table(facts))
        return
    if not as_json:  # first: what follows takes seconds, and may fail
        print(_table(facts), flush=True)
    proofs = [_proof(model)] if model is not None else [_proof_of_config(c) for c in _CONFIGS]
    self_test = _kernel_test()
    is_ok = all(proof.is_ok and (model is not None or not proof.refused) for proof in proofs) and (
        self_test is None or self_test.is_ok
    )
    if as_json:
        result: dict[str, Any] = {"ok": is_ok, **facts}
        result["proofs"] = [proof.as_dict() for proof in proofs]
        result["kernels_test"] = None if self_test is None else self_test.as_dict()
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        parts = [proof.as_text() for proof in proofs]
        parts.append("No GPU: no kernel ran." if self_test is None else self_test.as_text())
        parts.append("All right." if is_ok else "Not all is right: please report all of this.")
        print("", *parts, sep="\n\n")
    if not is_ok:
        raise typer.Exit(VERDICT)


def _facts() -> dict[str, str]:
    """Return versions and hardware by name."""
    import platform

    from rope_patch.transformers_api.models import NEWEST_TESTED, is_newer_than_tested
    from rope_patch.utils.installation import own_version, version
    from rope_patch.utils.provenance import hardware

    machine = hardware()
    facts = {
        "rope-patch": own_version(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    for package in ("transformers", "torch", "triton", "accelerate", "lm-eval", "datasets", "peft"):
        facts[package] = version(package)
    if is_newer_than_tested():
        facts["transformers"] += f" (newer than {NEWEST_TESTED}, the newest that was tested)"
    return facts | {
        "cpu": f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads",
        "gpu": ", ".join(machine["gpu"]) or "none",
        "kernels": _kernel_status(),
        "cache": _cache_summary(),
    }


def _table(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _kernel_status() -> str:
    """Return what rotates on this machine."""
    import torch

    from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason

    if problem := triton_unavailable_reason():
        return f"plain torch: {problem[0].lower()}{problem[1:]}"
    if is_interpreted():
        return "Triton's interpreter"
    return "Triton" if torch.cuda.is_available() else "plain torch: there is no GPU"


def _cache_summary() -> str:
    """Return the cache folder's path and size."""
    from rope_patch.utils.cache_folder import cache_folder

    folder = cache_folder()
    size = sum(path.stat().st_size for path in _files(folder))
    return f"{folder} ({size / 1e6:,.0f} MB)"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _proof(model: str) -> Any:
    """Return the proof of a model's class, made from its config."""
    from rope_patch.entry_points import prove
    from rope_patch.pretrained.demo import resolve_model_path
    from rope_patch.pretrained.loading import empty_model, read_original_config

    path = resolve_model_path(model)
    return prove(empty_model(path, read_original_config(path), any_kind=True))


def _proof_of_config(name: str) -> Any:
    """Return the proof of the class that a class of configs belongs to."""
    import transformers

    from rope_patch.entry_points import prove
    from rope_patch.pretrained.loading import empty_model

    return prove(empty_model(name, getattr(transformers, name)()))


def _kernel_test() -> Any:
    """Return the kernels' self-test; None where there is no GPU that runs them."""
    import torch

    from rope_patch.benchmarks.kernels.self_test import run_self_test
    from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason

    if not torch.cuda.is_available() or is_interpreted() or triton_unavailable_reason():
        return None
    return run_self_test()
