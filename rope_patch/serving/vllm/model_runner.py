"""The part of a model runner that tells each token the profile of its request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from rope_patch.serving.vllm.requests import admitted_length
from rope_patch.serving.vllm.rope_type import describe
from rope_patch.serving.vllm.stacked_tables import StackedRotary
from rope_patch.utils.errors import Refused

logger = logging.getLogger("vllm.rope_patch")  # below vLLM's, whose handler prints it


class RowWriter:
    """`_model_forward` of a model runner, which writes the rows of the batch's tokens before it."""

    def __init__(self, runner: Any, rotaries: list[StackedRotary]) -> None:
        self.runner = runner
        self.rotaries = rotaries
        # The class's, so that a second load of the model does not wrap the first one's.
        self.forward: Callable[..., Any] = type(runner)._model_forward.__get__(runner)
        self.max_length: int = runner.model_config.max_model_len
        self.all_first = True  # every row is 0, the first profile's

    def __call__(self, input_ids: Any = None, positions: Any = None, *args: Any, **kw: Any) -> Any:
        self.write_rows(positions.shape[-1])
        return self.forward(input_ids, positions, *args, **kw)

    def write_rows(self, padded_tokens: int) -> None:
        """Write the first row of every token's profile, and 0 for padding.

        Args:
            padded_tokens: Tokens of the forward, padding included.
        """
        runner = self.runner
        lengths = [
            self._length(runner.requests[request_id])
            for request_id in runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        ]
        starts = [[rotary.first_row(length) for length in lengths] for rotary in self.rotaries]
        if not any(map(any, starts)):
            if not self.all_first:
                for rotary in self.rotaries:
                    rotary.first_rows.zero_()
                self.all_first = True
            return
        self.all_first = False
        tokens = int(runner.query_start_loc.np[len(lengths)])
        request_of_token = runner.req_indices.gpu[:tokens]
        for rotary, start_rows in zip(self.rotaries, starts, strict=True):
            _write(rotary, start_rows, request_of_token, padded_tokens)

    def _length(self, request: Any) -> int:
        parameters = request.sampling_params
        return admitted_length(
            request.num_prompt_tokens,
            None if parameters is None else parameters.max_tokens,
            self.max_length,
        )


def _write(
    rotary: StackedRotary, start_rows: list[int], request_of_token: Any, padded_tokens: int
) -> None:
    from vllm.utils.torch_utils import async_tensor_h2d

    rows = rotary.first_rows
    tokens = request_of_token.shape[0]
    # A new tensor each step, since the copy of the last step's may be under way.
    starts = async_tensor_h2d(start_rows, device=rows.device, dtype=rows.dtype)
    rows[:tokens] = starts[request_of_token]
    rows[tokens:padded_tokens] = 0


def watch_runner(runner: Any) -> None:
    """Make a model runner write rows, once its model is loaded.

    Raises:
        ValueError: No module of the model rotates by profiles.
    """
    load_model: Callable[..., Any] = runner.load_model

    def load_and_watch(*args: Any, **keywords: Any) -> Any:
        from vllm.model_executor.models.interfaces import supports_mrope

        result = load_model(*args, **keywords)
        model = runner.get_model()
        rotaries = find_stacked(model)
        if supports_mrope(model) and not all(rotary.request.sections for rotary in rotaries):
            raise Refused(
                f"{type(model).__name__} gives a token several positions (M-RoPE): expected "
                "mrope_section in rope_parameters, got nothing; write it there as in the model's "
                "config.json"
            )
        if not rotaries:
            raise Refused(
                f"{type(model).__name__} builds its rotation without vLLM's get_rope, "
                "so the method named in rope_parameters rotates nothing: expected a decoder such "
                "as Llama, Qwen, Mistral or Gemma"
            )
        runner._model_forward = RowWriter(runner, rotaries)
        for rotary in rotaries:
            _log(rotary)
        return result

    runner.load_model = load_and_watch


def find_stacked(model: nn.Module) -> list[StackedRotary]:
    """Return the modules that rotate by profiles, each once; layers share them."""
    return [module for module in model.modules() if isinstance(module, StackedRotary)]


def _log(rotary: StackedRotary) -> None:
    logger.info(
        "rotation by request: %s; %s profiles, %.1f MiB of cos and sin",
        describe(rotary.request),
        len(rotary.profiles),
        rotary.table_bytes() / 2**20,
    )
    for line in rotary.describe_profiles():
        logger.info("%s", line)
