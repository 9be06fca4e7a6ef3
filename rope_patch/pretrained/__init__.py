"""Load, save and register extended models and adapters."""

from rope_patch.utils.front import front

front(
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
