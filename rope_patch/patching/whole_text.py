"""Read the whole text again where a model's generate drops its cache.

Phi-3 and its kin drop the cached keys in `generate` where a text passes the config's original
length. Up to transformers 5.17 they still pass on the newest token or its place alone, so the model
goes on as if nothing stood before it, with or without a patch. A patched model is given the whole
text there, as transformers does from 5.23 on.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rope_patch.patching.dynamic.generation_loop import WrappedMethod
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import TOKENS, cache_among
from rope_patch.transformers_api.generation import (
    PREPARE_INPUTS,
    drops_cache_alone,
    whole_text_arguments,
)


def read_dropped_texts_again(model: nn.Module, undo_log: UndoLog) -> None:
    """Give a model's forward the whole text wherever its generate drops the cache.

    Args:
        model: The patched model, or a wrapper of it.
        undo_log: Log of the changes.
    """
    for module in model.modules():
        if drops_cache_alone(module):
            wrapped = _PrepareInputs(getattr(module, PREPARE_INPUTS), None)
            undo_log.set(module, PREPARE_INPUTS, wrapped)


class _PrepareInputs(WrappedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = self.original_method(*args, **kwargs)
        cache = cache_among(kwargs)
        if cache is None or cache_among(inputs) is not None or cache.get_seq_length() == 0:
            return inputs
        whole = args[0] if args else kwargs[TOKENS]
        return dict(self.original_method(*args, **kwargs | whole_text_arguments(whole)))
