"""Load, save and register extended models and adapters.

`loading` makes a model of a folder, a name on the Hub or a GGUF file, and patches it as requested
or as the folder's sidecar records. `saving` writes the folder, `patched_checkpoint` without reading
weights. `sidecar` has the record of a patch, and of the rotation that weights were trained under;
`encoding_checkpoint` that of models that do not rotate. `adapters` fits PEFT's adapters to their
base. Open `sidecar` first.
"""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "demo": "demo_folder resolve_model_path",
        "loading": "auto_class empty_model read_model read_tokenizer",
        "quantization": (
            "GGUF_TYPES loading_arguments parse_quantization quantize require_unquantized"
        ),
        "sidecar": "mark_trained",
    },
)
