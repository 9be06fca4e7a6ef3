"""rope_patch: one line takes a pretrained RoPE decoder to a longer context."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rope_patch.methods import frequencies, list_methods, register_method  # need no torch
from rope_patch.utils.deprecation import warn_renamed

if TYPE_CHECKING:
    from rope_patch.diagnosing import Diagnosis, diagnose
    from rope_patch.evaluation.entry_points import Evaluation, compare, evaluate
    from rope_patch.exporting import Export, export
    from rope_patch.extending import Extended, extend
    from rope_patch.extension import Extension
    from rope_patch.integrations.trainer_callback import RopePatchCallback
    from rope_patch.patching import Patch, encode, list_encodings, patch, restore, unpatch
    from rope_patch.patching.active import current
    from rope_patch.patching.encodings.handle import EncodingPatch
    from rope_patch.patching.replacement.handle import EncodedModel
    from rope_patch.pictures import picture
    from rope_patch.pretrained.adapters import load_adapter
    from rope_patch.pretrained.loading import load
    from rope_patch.pretrained.patched_checkpoint import PatchedCheckpoint, patch_checkpoint
    from rope_patch.pretrained.saving import save
    from rope_patch.pretrained.transformers_registry import (
        register_rope_types,
        unregister_rope_types,
    )
    from rope_patch.recommending import recommend
    from rope_patch.searching import SearchResult, search
    from rope_patch.utils.errors import Refused
    from rope_patch.verifying import Verification, verify

    __version__: str

__all__ = [
    "Diagnosis",
    "EncodedModel",
    "EncodingPatch",
    "Evaluation",
    "Export",
    "Extended",
    "Extension",
    "Patch",
    "PatchedCheckpoint",
    "Refused",
    "RopePatchCallback",
    "SearchResult",
    "Verification",
    "compare",
    "current",
    "diagnose",
    "encode",
    "evaluate",
    "export",
    "extend",
    "frequencies",
    "list_encodings",
    "list_methods",
    "load",
    "load_adapter",
    "patch",
    "patch_checkpoint",
    "picture",
    "recommend",
    "register_method",
    "register_rope_types",
    "restore",
    "save",
    "search",
    "unpatch",
    "unregister_rope_types",
    "verify",
]

# Names that are imported on first use (PEP 562), because their modules import torch and
# transformers, which take seconds.
_MODULES = {
    "Diagnosis": "diagnosing",
    "EncodedModel": "patching.replacement.handle",
    "EncodingPatch": "patching.encodings.handle",
    "Evaluation": "evaluation.entry_points",
    "Export": "exporting",
    "Extended": "extending",
    "Extension": "extension",
    "Patch": "patching",
    "PatchedCheckpoint": "pretrained.patched_checkpoint",
    "Refused": "utils.errors",
    "RopePatchCallback": "integrations.trainer_callback",
    "SearchResult": "searching",
    "Verification": "verifying",
    "compare": "evaluation.entry_points",
    "current": "patching.active",
    "diagnose": "diagnosing",
    "encode": "patching",
    "evaluate": "evaluation.entry_points",
    "export": "exporting",
    "extend": "extending",
    "list_encodings": "patching",
    "load": "pretrained.loading",
    "load_adapter": "pretrained.adapters",
    "patch": "patching",
    "patch_checkpoint": "pretrained.patched_checkpoint",
    "picture": "pictures",
    "recommend": "recommending",
    "register_rope_types": "pretrained.transformers_registry",
    "restore": "patching",
    "save": "pretrained.saving",
    "search": "searching",
    "unpatch": "patching",
    "unregister_rope_types": "pretrained.transformers_registry",
    "verify": "verifying",
}
_RENAMED = {  # old names, which go with the next version
    "Found": "SearchResult",
    "register": "register_rope_types",
    "unregister": "unregister_rope_types",
}


if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name):
        """Import a public name, or a submodule, on first use."""
        if name in _RENAMED:
            warn_renamed(f"rope_patch.{name}", f"rope_patch.{_RENAMED[name]}")
            return getattr(import_module("rope_patch"), _RENAMED[name])
        if name in _MODULES:
            value = getattr(import_module(f"rope_patch.{_MODULES[name]}"), name)
        elif name == "__version__":
            from rope_patch.utils.versions import own_version

            value = own_version()
        elif name.startswith("_"):
            raise AttributeError(f"module 'rope_patch' has no attribute {name!r}")
        else:
            try:
                return import_module(f"rope_patch.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"rope_patch.{name}":
                    raise
                raise AttributeError(f"module 'rope_patch' has no attribute {name!r}") from None
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the names that are not imported yet, too."""
    return sorted({*globals(), *__all__, "__version__"})
