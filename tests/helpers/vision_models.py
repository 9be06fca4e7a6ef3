"""Make tiny random vision language models with M-RoPE, vision towers included, and inputs."""

import torch
import transformers
from transformers.models.qwen2_vl import modeling_qwen2_vl

from helpers.tiny_models import SIZES, make_config

IMAGE, VIDEO, VISION_START, VISION_END = 4, 5, 6, 7
GRID = (1, 8, 12)  # an image in patches: time, height, width
MERGED = (4, 6)  # the same in tokens: two by two patches are one
IMAGE_TOKENS = 24

# 8 pairs of a head of 16; Qwen 3.5 rotates a quarter of a head of 64.
_TEXT = {**SIZES, "tie_word_embeddings": False}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4}
_TOWER = {**_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
_HYBRID = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

# Sections of pairs: how many each axis has. Model class, text fields, vision fields.
SECTIONS = {
    "qwen2_vl": [2, 3, 3],
    "qwen2_5_vl": [4, 2, 2],
    "qwen3_vl": [4, 2, 2],
    "qwen3_vl_moe": [3, 3, 2],
    "qwen3_5": [3, 3, 2],
    "qwen3_5_moe": [4, 2, 2],
}
_MODELS = {
    "qwen2_vl": ("Qwen2VL", {}, {**_VISION, "embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        "Qwen3VL",
        {},
        {**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _EXPERTS,
        {**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("Qwen3_5", _HYBRID, {**_TOWER, "num_position_embeddings": 64}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_EXPERTS, **_HYBRID},
        {**_TOWER, "num_position_embeddings": 64},
    ),
}
# Old releases lack some, and up to 5.10 apply the sections of Qwen2's in the attention.
_IN_ATTENTION = "qwen2" if hasattr(modeling_qwen2_vl, "apply_multimodal_rotary_pos_emb") else "none"
MODEL_TYPES = [
    model_type
    for model_type, (name, _, _) in _MODELS.items()
    if hasattr(transformers, f"{name}Config") and not model_type.startswith(_IN_ATTENTION)
]
SAMPLE = [name for name in ("qwen2_vl", "qwen3_vl", "qwen3_5") if name in MODEL_TYPES]


def vision_config(model_type, **changes):
    """Return a tiny config, whose text part has the sizes of `tiny_models`."""
    name, text, vision = _MODELS[model_type]
    rope = {**_ROPE, "mrope_section": SECTIONS[model_type]}
    if "head_dim" in text:
        rope["partial_rotary_factor"] = 0.25
    text = {**_TEXT, **text, "rope_parameters": rope, **changes}
    return getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )


def vision_model(model_type, seed=0, spread=0.1, **changes):
    """Return a tiny random model in evaluation mode, the same for the same seed."""
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{_MODELS[model_type][0]}ForConditionalGeneration")
    model = kind(vision_config(model_type, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, spread)
    return model


def gemma3_with_vision():
    """Return a tiny Gemma 3 with a vision tower, whose image tokens `tiny_models.tokens` has not.

    Its text positions are one each, and the decoder is given masks that show no padding.
    """
    text = make_config("gemma3").to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    ids = {"image_token_id": 2, "boi_token_id": 200, "eoi_token_id": 201}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def text_tokens(length, seed=1):
    """Return random ids of text, `[1, S]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, SIZES["vocab_size"], (1, length), generator=generator)


def image_prompt(before, after, seed=1):
    """Return inputs of text, an image and text, as a processor gives them."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.full((1, IMAGE_TOKENS), IMAGE)
    start, end = torch.tensor([[VISION_START]]), torch.tensor([[VISION_END]])
    parts = [text_tokens(before, seed), start, image, end, text_tokens(after, seed + 1)]
    ids = torch.cat(parts, dim=1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(GRID[1] * GRID[2], 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([GRID]),
    }


def image_positions(before, after):
    """Return the positions of `image_prompt`, `[3, 1, S]`, by Qwen2-VL's rule (arXiv:2409.12191).

    A token of the image has its row and column, counted from the position after the text. Text
    behind the image continues from the largest position + 1.
    """
    start = before + 1
    rows, columns = torch.meshgrid(*map(torch.arange, MERGED), indexing="ij")
    image = torch.stack([torch.zeros(MERGED, dtype=torch.long), rows, columns]).flatten(1) + start
    text = torch.arange(start).expand(3, -1)
    rest = torch.arange(1 + after).expand(3, -1) + image.max() + 1
    return torch.cat([text, image, rest], dim=1)[:, None]


def next_positions(positions, tokens):
    """Return the positions of text behind `positions`, `[3, 1, tokens]`."""
    return (torch.arange(tokens) + positions.max() + 1).expand(3, 1, -1)
