"""rope_patch: one line takes a pretrained RoPE decoder to a longer context."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rope_patch.methods import frequencies, list_methods, register_method  # need no torch
from rope_patch.utils.installation import warn_renamed
from rope_patch.utils.lazy_exports import export_lazily

if TYPE_CHECKING:
    from rope_patch.diagnosing import Diagnosis, diagnose
    from rope_patch.encodings.active import current
    from rope_patch.encodings.replacement.entry_point import EncodedModel, encode, list_encodings
    from rope_patch.encodings.sites.handle import EncodingPatch
    from rope_patch.entry_points import check_method, patch, unpatch
    from rope_patch.evaluation.entry_points import Evaluation, compare, evaluate
    from rope_patch.exporting import Export, export
    from rope_patch.extending import Extended, extend
    from rope_patch.extension import Extension
    from rope_patch.integrations.trainer_callback import RopePatchCallback
    from rope_patch.patching import Patch, restore
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
    from rope_patch.served.entry_point import compare_servers, evaluate_server
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
    "check_method",
    "compare",
    "compare_servers",
    "current",
    "diagnose",
    "encode",
    "evaluate",
    "evaluate_server",
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

_RENAMED = {  # old names, which go with the next version
    "Found": "SearchResult",
    "register": "register_rope_types",
    "unregister": "unregister_rope_types",
}


if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name):
        """Return what an old name stands for, the version, or a submodule."""
        if name in _RENAMED:
            warn_renamed(f"rope_patch.{name}", f"rope_patch.{_RENAMED[name]}")
            return getattr(import_module("rope_patch"), _RENAMED[name])
        if name == "__version__":
            from rope_patch.utils.installation import own_version

            return own_version()
        if name.startswith("_"):
            raise AttributeError(f"module 'rope_patch' has no attribute {name!r}")
        try:
            return import_module(f"rope_patch.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"rope_patch.{name}":
                raise
            raise AttributeError(f"module 'rope_patch' has no attribute {name!r}") from None


# Their modules import torch and transformers, which take seconds.
export_lazily(
    __name__,
    {
        "diagnosing": "diagnose Diagnosis",
        "encodings.active": "current",
        "encodings.replacement.entry_point": "encode EncodedModel list_encodings",
        "encodings.sites.handle": "EncodingPatch",
        "entry_points": "check_method patch unpatch",
        "evaluation.entry_points": "compare evaluate Evaluation",
        "exporting": "Export export",
        "extending": "extend Extended",
        "extension": "Extension",
        "integrations.trainer_callback": "RopePatchCallback",
        "patching": "Patch restore",
        "pictures": "picture",
        "pretrained.adapters": "load_adapter",
        "pretrained.loading": "load",
        "pretrained.patched_checkpoint": "patch_checkpoint PatchedCheckpoint",
        "pretrained.saving": "save",
        "pretrained.transformers_registry": "register_rope_types unregister_rope_types",
        "recommending": "recommend",
        "searching": "search SearchResult",
        "served.entry_point": "compare_servers evaluate_server",
        "utils.errors": "Refused",
        "verifying": "Verification verify",
    },
)


def __dir__() -> list[str]:
    """List the public names, also those that are not imported yet."""
    return sorted({*__all__, "__version__"})
