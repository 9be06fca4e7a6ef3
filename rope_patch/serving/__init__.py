"""Rotate by length inside serving engines: what rope_patch adds to an engine's own process.

`vllm` is a plugin of vLLM, whose `plugin.register` each of vLLM's processes calls. Each request
gets the profile of its length, a rotation that stays (`profiles`). `transformers_server` has
`transformers serve` load folders as `rope_patch.load` does.
"""

from __future__ import annotations

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "transformers_server": "patched_manager",
        "vllm.profiles": "make_profiles ProfileLengths stack_tables",
        "vllm.requests": "admitted_length profile_salt",
        "vllm.requirements": "require_readable",
        "vllm.rope_type": "method_name our_parameters read_request rope_type_for",
        "vllm.stacked_tables": "StackedRotary",
    },
)
