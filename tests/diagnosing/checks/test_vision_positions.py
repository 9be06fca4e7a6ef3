"""Test what diagnose says of positions in video against transformers' own `get_rope_index`."""

import inspect
import json

import pytest
import torch
import transformers
from helpers.vision_models import (
    MODEL_TYPES,
    VIDEO,
    VISION_END,
    VISION_START,
    vision_config,
    vision_model,
)

import rope_patch

TRAINED = 1024
PATCHES = {"qwen2_vl": 14, "qwen2_5_vl": 14}  # pixels; 16 from Qwen3-VL on


def config_of(model_type):
    config = vision_config(model_type, max_position_embeddings=TRAINED)
    config.vision_config.patch_size = PATCHES.get(model_type, 16)
    return config


def find(subject, **arguments):
    diagnosis = rope_patch.diagnose(subject, **arguments)
    return [each for each in diagnosis.findings if each.code == "positions-of-images"]


def ids_of(numbers, in_one_grid):
    """Return the tokens that a processor makes of the video; 9 stand for a timestamp."""
    grid = numbers["height"] * numbers["width"]
    if in_one_grid:
        return [VISION_START, *[VIDEO] * (numbers["grids"] * grid)]
    return [*[10] * 9, VISION_START, *[VIDEO] * grid, VISION_END] * numbers["grids"]


@pytest.mark.parametrize("length", [1300, 4096], ids=["few grids", "many grids"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_positions_of_a_video_are_those_of_transformers(model_type, length):
    config = config_of(model_type)
    (finding,) = find(config, length=length)
    numbers = finding.numbers
    in_one_grid = model_type in PATCHES
    ids = torch.tensor([ids_of(numbers, in_one_grid)])
    model = vision_model(model_type)
    merge = model.config.vision_config.spatial_merge_size
    video = [numbers["grids"], merge * numbers["height"], merge * numbers["width"]]
    given = {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == VIDEO).int(),
        "video_grid_thw": torch.tensor([video]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }
    index = model.model.get_rope_index
    names = inspect.signature(index).parameters
    positions, _ = index(**{name: value for name, value in given.items() if name in names})
    before = 1 if in_one_grid else 0  # the token that begins the video is not of its grid
    assert numbers["tokens"] == ids.shape[1] - before <= length
    assert numbers["positions"] == int(positions.max()) + 1 - before
    assert numbers["factor_by_positions"] == max(1, numbers["positions"] / TRAINED)
    # A mix of text and the share of video that is named ends where the smaller factor reaches.
    share, ratio = numbers["share_of_video"], numbers["positions"] / numbers["tokens"]
    end = length * (1 - share + share * ratio)
    assert end == pytest.approx(max(TRAINED, 0.75 * length))


def test_qwen3_vl_reads_a_million_tokens_of_video_by_factor_3():
    config = config_of("qwen3_vl")
    config.text_config.max_position_embeddings = 262144
    assert find(config) == find(config, length=2**20)  # the example is four times the length
    (finding,) = find(config)
    assert "For 1,048,576 tokens factor 3 suffices instead of 4 if at least 29%" in finding.what
    assert "a video of 640 × 360 pixels alone, 4,539 grids of 20 × 11 tokens" in finding.evidence
    assert finding.fix == 'rope_patch.patch(model, "yarn", factor=3)'
    diagnosis = rope_patch.diagnose(config)
    assert diagnosis.healthy
    assert " ".join(finding.what.split()) in " ".join(str(diagnosis).split())
    shown = json.loads(json.dumps(diagnosis.to_dict()))["findings"]
    assert [
        each["numbers"]["smaller_factor"] for each in shown if each["code"] == finding.code
    ] == [3]


def test_nothing_is_said_where_no_such_video_fits_or_positions_are_those_of_tokens():
    assert not find(vision_config("qwen3_vl"))  # trained on 64 tokens, and a grid has 3,600
    text = transformers.LlamaConfig(num_hidden_layers=1)
    assert not find(text)
    assert not find(config_of("qwen3_vl").text_config)
