"""Load, save and register extended models and adapters."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "demo": "demo_folder resolve_model_path",
        "loading": "empty_model read_model read_tokenizer",
        "model_class": "auto_class",
        "quantization": "GGUF_TYPES loading_arguments parse_quantization quantize "
        "require_unquantized",
        "trained_rotation": "mark_trained",
    },
)
