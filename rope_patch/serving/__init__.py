"""Rotation by length inside serving engines: what rope_patch adds to an engine's own process."""

from __future__ import annotations

from rope_patch.utils.front import front

front(
    __name__,
    {
        "transformers_server": "patched_manager",
        "vllm.admission": "admitted_length",
        "vllm.cache_salt": "profile_salt",
        "vllm.profiles": "ProfileLengths make_profiles stack_tables",
        "vllm.requirements": "require_readable",
        "vllm.stacked_tables": "StackedRotary",
        "vllm.rope_type": "method_name our_parameters read_request rope_type_for",
    },
)
