"""Test that mlx-lm, with the fields that export prints in its config.json, rotates as asked."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("mlx_lm")
from export_servers import mlx_lm
from tiny_checkpoints import CASES, LEAST_MARGIN, export_error, print_export

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

REFUSED = ("gpt-oss", "gpt-oss, yarn")


def copy_checkpoint(source, folder, config):
    """Copy a checkpoint with other fields in its config, for mlx-lm to read."""
    shutil.copytree(source, folder)
    config = {**json.loads((source / "config.json").read_text()), **config}
    if config["model_type"] == "gpt_oss":
        rename_experts(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def rename_experts(path):
    """Write gpt-oss's experts as mlx-lm's own converter does, which reads 4-bit ones only."""
    renamed = {}
    for name, tensor in load_file(path).items():
        stem = name.removesuffix("_bias")
        suffix = ".bias" if stem != name else ".weight"
        if "gate_up_proj" in name:
            tensor = tensor if stem != name else tensor.transpose(1, 2)
            for start, part in enumerate(("gate_proj", "up_proj")):
                renamed[stem.replace("gate_up_proj", part) + suffix] = tensor[:, start::2]
        elif "experts.down_proj" in name:
            renamed[stem + suffix] = tensor if stem != name else tensor.transpose(1, 2)
        else:
            renamed[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, path)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_the_printed_fields_rotate_as_asked(name, folder_of, tmp_path):
    case = CASES[name]
    checkpoint, folder = folder_of(case.checkpoint), tmp_path / case.checkpoint
    copy_checkpoint(checkpoint, folder, print_export(case, checkpoint, "mlx").config)
    with mlx_lm(folder, tmp_path / "log.txt") as url:
        found = case.verify(url, checkpoint)
    assert found.status == "as-asked"
    assert found.verdict.margin > LEAST_MARGIN


def test_without_the_printed_fields_the_scaling_is_lost(folder_of, tmp_path):
    case = CASES["Qwen, yarn"]
    with mlx_lm(folder_of(case.checkpoint), tmp_path / "log.txt") as url:
        found = case.verify(url, folder_of(case.checkpoint))
    assert found.verdict.explains == ("unscaled",)


@pytest.mark.parametrize("name", REFUSED)
def test_an_untruncated_ramp_of_gpt_oss_is_refused_because_mlx_lm_truncates_it(
    name, folder_of, tmp_path
):
    assert "yarn with truncate=True" in export_error(CASES[name], folder_of("gpt-oss"), "mlx")


def test_mlx_lm_truncates_the_ramp_of_gpt_oss(folder_of, tmp_path):
    """The reason of the refusal: what mlx-lm makes of the published config by itself."""
    checkpoint, folder = folder_of("gpt-oss"), tmp_path / "gpt-oss"
    published = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]
    theta = published.pop("rope_theta")
    copy_checkpoint(checkpoint, folder, {"rope_theta": theta, "rope_scaling": published})
    with mlx_lm(folder, tmp_path / "log.txt") as url:
        assert CASES["gpt-oss"].verify(url, checkpoint).status != "as-asked"
        assert CASES["gpt-oss, truncated yarn"].verify(url, checkpoint).status == "as-asked"
