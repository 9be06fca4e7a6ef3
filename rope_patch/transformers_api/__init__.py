"""What the package leans on in transformers, asked in one place.

transformers moves: it renames arguments, moves classes and changes what a cache holds, from one
release to the next. Every such name and shape is asked here, by one small function or constant
each, whose text says which releases have which form. The rest of the package imports from
`transformers` only what its own top level offers. So a new release costs one folder.

- `forwards`: the arguments of a forward, by kind before name: tokens, positions, mask, cache.
- `attention_functions`: what eager attention, SDPA, flash and flex attention do with arguments.
- `caches`: classes of caches and their layers, paged caches, the cache in an output.
- `generation`: the steps of `generate`, continuous batching, `transformers serve`.
- `chat_templates`: their clock.
- `models`: the installed release and the newest tested one, registries, and parts of models.
- `remote_code`: code that a checkpoint brings: the permission to execute it, and its digest.
- `training`: what the Trainer calls.

What is looked for and not there is refused by name, together with the installed release; nothing
here returns a guess. Open `forwards` first.
"""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "attention_functions": "AttentionCall read_call StandIn",
        "caches": "cache_in_output is_cache is_paged",
        "forwards": "cache_among cache_arguments cache_parameter ForwardCall",
        "generation": "served_folder",
        "models": "NEWEST_TESTED",
        "training": "require_overridable",
    },
)
