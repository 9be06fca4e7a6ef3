"""Test that what the package overrides in transformers' trainer is what transformers calls."""

import pytest
from transformers import Trainer, TrainerCallback

from rope_patch import RopePatchCallback
from rope_patch.integrations import trainer_callback
from rope_patch.training import trainer
from rope_patch.transformers_api.training import require_overridable


def overridden(subclass, base):
    return {name for name in vars(subclass) if name in dir(base) and not name.startswith("__")}


@pytest.mark.parametrize(
    ("subclass", "base", "names"),
    [
        (trainer.LongContextTrainer, Trainer, trainer.OVERRIDDEN),
        (trainer._TrainerHooks, TrainerCallback, trainer.CALLED_BACK),
        (RopePatchCallback, TrainerCallback, trainer_callback.CALLED_BACK),
    ],
)
def test_every_override_is_asked_for(subclass, base, names):
    assert overridden(subclass, base) == set(names)


def test_an_override_that_nobody_calls_is_refused(monkeypatch):
    monkeypatch.delattr(TrainerCallback, "on_push_begin")
    with pytest.raises(ValueError, match="has no on_push_begin, which RopePatchCallback overrides"):
        RopePatchCallback()
    require_overridable(TrainerCallback, RopePatchCallback, "on_save")
