"""A plugin for axolotl, which patches the model that it trains.

    plugins:
      - rope_patch.integrations.axolotl_plugin.RopePatchPlugin
    rope_patch:
      method: dynamic-yarn
      trained_length: 8192

Only axolotl imports this module. Written from axolotl 0.18.0, integrations/base.py.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from rope_patch.encodings.active import current
from rope_patch.entry_points import patch
from rope_patch.extension import Extension
from rope_patch.integrations.trainer_callback import RopePatchCallback
from rope_patch.utils.errors import Refused


class RopePatchArgs(BaseModel):
    """The plugin's key in axolotl's YAML file: the arguments of `rope_patch.patch`."""

    rope_patch: dict[str, Any] | None = None


class RopePatchPlugin(BasePlugin):
    """Patch the model once it is built, and have its trainer use `RopePatchCallback`."""

    def get_input_args(self) -> str:
        """Return the class of the plugin's keys."""
        return f"{__name__}.RopePatchArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patch a model before it gets an adapter; reference models of RL, too."""
        request = _request(cfg)
        if request is not None and current(model) is None:
            patch(model, request)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[RopePatchCallback]:
        """Return the callback; without a request, the model's folder must record a patch."""
        request = _request(cfg)
        return [RopePatchCallback() if request is None else RopePatchCallback(request)]


def _request(cfg: Any) -> Extension | None:
    """Return the request of axolotl's config, or None if it has none."""
    value = cfg.get("rope_patch")
    if not value:
        return None
    if not isinstance(value, dict) or "method" not in value:
        raise Refused(
            "rope_patch: expected a mapping with a method, such as {method: yarn, factor: 4}, got "
            f"{value!r}"
        )
    return Extension.of(**{str(name): _plain(item) for name, item in value.items()})


def _plain(value: Any) -> Any:
    """Return a value of axolotl's config as plain dictionaries and lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
