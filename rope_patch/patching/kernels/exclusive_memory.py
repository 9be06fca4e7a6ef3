"""Proof that nothing but an attention's forward can read its queries and keys.

Such queries and keys may be overwritten by their rotation, which saves the memory of a copy. Every
reader holds one of four things, all of which are counted: the Python object, the C++ tensor, a view
(whose base is a C++ tensor, too) or the storage. If one count exceeds the references of the forward
and of this module, something else can read the memory. Readers without a reference (a stream that
copies, another process) come from hooks, so no hook may see a projection's output.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from rope_patch.ops.modes import has_global_hooks, needs_plain_torch

# References to a tensor within `are_exclusive`, if the forward alone has it: a variable each of the
# forward, of its callee and of `are_exclusive`, and the argument of `getrefcount`. Until Python
# 3.10, both callers' stacks keep their arguments during a call. These are the fewest references
# possible: a debugger or a profiler adds some, so that tensors are copied. Other versions of Python
# may borrow references, so tensors are copied there.
_REFERENCES = {(3, 10): 6, (3, 11): 4, (3, 12): 4, (3, 13): 4}.get(sys.version_info[:2], 0)


class _SharedCounts(NamedTuple):
    """References that Python sees within `_has_shared_memory`, which depend on torch's version."""

    base: int
    storage: int


def is_overwriting_possible(attention: nn.Module) -> bool:
    """Return whether an attention may overwrite queries and keys that are exclusive."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and not needs_plain_torch()
        and torch._C._len_torch_dispatch_stack() == 0  # modes may hold weak references
        and not has_global_hooks()
        and not any(
            (module._forward_hooks or module._forward_pre_hooks)
            for module in attention.modules()
            if module is not attention
        )
        and counts_are_reliable()
    )


def are_exclusive(q: torch.Tensor, k: torch.Tensor | None = None) -> bool:
    """Return whether q and k have no reader besides the caller, and its caller.

    Each of both must hold q and k in one variable, and hand them over by position.
    """
    q_references = sys.getrefcount(q)
    k_references = q_references if k is None else sys.getrefcount(k)
    if q_references != _REFERENCES or k_references != _REFERENCES:
        return False
    return not _has_shared_memory(q) and (k is None or not _has_shared_memory(k))


def _has_shared_memory(x: Any) -> bool:
    """Return whether something other than the Python object x can read its memory."""
    if type(x) is not torch.Tensor or x.layout is not torch.strided or _cpp_references(x) != 1:
        return True
    base: Any = x._base
    expected = _shared_counts()
    if base is not None and (
        type(base) is not torch.Tensor
        or base.requires_grad
        or _cpp_references(base) != 2  # x and this variable
        or sys.getrefcount(base) != expected.base
        or weakref.getweakrefcount(base)
    ):
        return True
    storage = x.untyped_storage()
    return (
        x.requires_grad
        or x.is_inference() != torch.is_inference_mode_enabled()
        or weakref.getweakrefcount(x) + weakref.getweakrefcount(storage) > 0
        or sys.getrefcount(storage) != expected.storage
        # This variable, x, and its base.
        or torch._C._storage_Use_Count(storage._cdata) != (2 if base is None else 3)
        or storage.nbytes() != x.numel() * x.element_size()
        or not storage.resizable()  # torch does not own the memory: NumPy, DLPack, a mapped file
        or (x.device.type == "cpu" and storage.is_shared())  # other processes may share it
        or torch._debug_has_internal_overlap(x) != 0
    )


def _cpp_references(x: Any) -> int:
    return x._use_count()


@functools.cache
def _shared_counts() -> _SharedCounts:
    with torch.inference_mode(False):  # in inference mode views have no base
        owner = torch.empty(2)
        view = owner[:]
    del owner
    base, storage = view._base, view.untyped_storage()
    return _SharedCounts(sys.getrefcount(base), sys.getrefcount(storage))


# -- self-test -------------------------------------------------------------------------------------


def counts_are_reliable() -> bool:
    """Return whether every kind of reader changes a count in this Python and this torch."""
    if not _REFERENCES or sys.implementation.name != "cpython":
        return False
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # other threads could count meanwhile
        return False
    return _Probe.passed or _Probe().run()


class _Probe:
    """A stand-in for an attention, with known readers."""

    passed = False  # only success is kept, because a debugger changes counts

    def run(self) -> bool:
        """Return whether all known readers are seen, and nobody where there is none."""
        readers: list[Any] = [
            lambda x: x,
            lambda x: x[:1],
            lambda x: x.detach(),
            lambda x: x.untyped_storage(),
        ]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                if not self.forward(lambda x: None, lambda x: None):
                    return False
                if any(
                    self.forward(reader, lambda x: None) or self.forward(lambda x: None, reader)
                    for reader in readers
                ):
                    return False
        _Probe.passed = True
        return True

    def forward(self, read_projection: Any, read_query: Any) -> bool:
        """Rotate as an attention does, while something keeps what the readers return."""
        projection = torch.empty(1, 2, 4)
        kept = [read_projection(projection)]
        q = projection.view(1, 2, 2, 2).transpose(1, 2)
        k = torch.empty(1, 2, 4).view(1, 2, 2, 2).transpose(1, 2)
        del projection
        kept.append(read_query(q))
        rotate = self.rotate
        return rotate(q, k)

    def rotate(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Ask as `PatchedAttentionForward.rotate` does."""
        return are_exclusive(q, k)
