"""Make Triton's interpreter faster, for tests.

It patches `triton.language` for each launch, and again at each call of a device function, where
nothing is left to patch. It looks for overflow in every sum of integers, for an assertion that it
then leaves out. And it describes the same few shapes and types again for every operation.
"""

import functools
import importlib


@functools.cache  # each caller would wrap what the one before has wrapped
def hasten_interpreter():
    """Leave out what an interpreted kernel does without effect, if this Triton does it."""
    try:
        language = importlib.import_module("triton.language")
        interpreter = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    for change in (_patch_once_a_launch, _look_for_no_overflow, _describe_once):
        try:
            change(language, interpreter)
        except AttributeError:
            continue


def _patch_once_a_launch(language, interpreter):
    """Leave out the patches within a launch."""
    patch, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    active = {}  # by module of the language, whose names the functions of a launch see

    class Scope(scope_class):
        def restore(self):
            active.clear()
            super().restore()

    def patch_once(function):
        seen = {id(x) for x in function.__globals__.values() if x is language or x is language.core}
        if active.keys() >= seen:
            return scope_class()
        scope = next(iter(active.values()), None) or Scope()
        scope._changes += patch(function)._changes
        active.update(dict.fromkeys(seen, scope))
        return scope

    interpreter._patch_lang = patch_once


def _look_for_no_overflow(language, interpreter):
    """Add integers without a second sum of 64 bits, unless its assertion stands."""
    options = interpreter.interpreter_builder.options
    if options.sanitize_overflow and not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)  # a frozen dataclass


def _describe_once(language, interpreter):
    """Compute what depends on a shape or a type alone once."""
    core, semantic = language.core, type(interpreter.interpreter_semantic)
    unwrap, describe_tensor = core._unwrap_if_constexpr, core.tensor.__init__
    describe_block, change_element = core.block_type.__init__, core.block_type.with_element_ty
    broadcast, find_dtype = semantic.broadcast_impl_value, interpreter._get_np_dtype
    shapes, tensors, dtypes = {}, {}, {}

    def unwrap_quickly(value):
        return value if type(value) is int else unwrap(value)

    def init_block(self, element_ty, shape):
        key = tuple([unwrap_quickly(x) for x in shape])
        if key not in shapes:
            describe_block(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, f"{self.shape}"
        self.element_ty, self.same_shape = element_ty, {}
        self.shape, self.numel, text = shapes[key]
        self.name = f"<{text}, {element_ty}>"

    def with_element_ty(self, scalar_ty):
        key = id(scalar_ty)  # pointers' types have no hash; the block keeps its type alive
        if key not in self.same_shape:
            self.same_shape[key] = change_element(self, scalar_ty)
        return self.same_shape[key]

    def init_tensor(self, handle, kind):
        key = id(kind.shape) if kind.is_block() else None  # a shape is never forgotten
        if key not in tensors:
            describe_tensor(self, handle, kind)
            tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = tensors[key]

    def broadcast_others(self, one, other):
        if one.type.is_block() and other.type.is_block() and one.type.shape is other.type.shape:
            return one, other
        return broadcast(self, one, other)

    def find_dtype_once(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find_dtype(dtype)
        return dtypes[dtype.name]

    core._unwrap_if_constexpr = unwrap_quickly
    core.block_type.__init__, core.block_type.with_element_ty = init_block, with_element_ty
    core.tensor.__init__ = init_tensor
    semantic.broadcast_impl_value = broadcast_others
    interpreter._get_np_dtype = find_dtype_once
