"""Make Triton's interpreter faster, for tests.

It patches `triton.language` for each launch, and again at each call of a device function, where
nothing is left to patch: a third of the time of a kernel that calls several.
"""

import functools
import importlib


@functools.cache  # each caller would wrap what the one before has wrapped
def patch_language_once_a_launch():
    """Leave out the patches within a launch, if this Triton has them."""
    try:
        language = importlib.import_module("triton.language")
        interpreter = importlib.import_module("triton.runtime.interpreter")
        patch, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    except (ImportError, AttributeError):
        return
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
