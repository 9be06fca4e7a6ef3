"""Test that `vllm serve`, with the words that export prints, rotates as asked, without a plugin."""

import pytest

pytest.importorskip("vllm")
pytest.importorskip("gguf")
import torch
from export_servers import vllm
from tiny_checkpoints import CASES, LEAST_MARGIN, Case, print_export
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.models.deepseek_v4.common.rope import build_deepseek_v4_rope

import rope_patch
from rope_patch.pretrained import empty_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


OWN_CASES = CASES | {
    "Qwen, warmer yarn": Case.of("Qwen3", "yarn", factor=4, attention_factor=1.3),
}


@pytest.mark.parametrize("name", OWN_CASES)
def test_the_printed_line_rotates_as_asked(name, folder_of, tmp_path):
    case = OWN_CASES[name]
    folder = folder_of(case.checkpoint)
    words = print_export(case, folder, "vllm").words
    with vllm(folder, words, tmp_path / "log.txt") as url:
        found = case.verify(url, folder)
    assert found.status == "as-asked"
    assert found.verdict.margin > LEAST_MARGIN


def test_without_the_printed_line_the_scaling_is_lost(folder_of, tmp_path):
    case = CASES["Qwen, yarn"]
    folder = folder_of(case.checkpoint)
    with vllm(folder, [], tmp_path / "log.txt") as url:
        found = case.verify(url, folder)
    assert found.verdict.explains == ("unscaled",)


@pytest.mark.parametrize(
    ("own", "method", "request_"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 256}, "yarn", {}),
        (None, "yarn", {"attention_factor": 1.0}),
        (None, "ntk", {}),
        (None, "abf", {}),
    ],
)
def test_deepseek_v4s_tables_are_of_the_patched_models_frequencies(own, method, request_):
    """The model needs a GPU, so its rotary modules are built and their tables read."""
    config = CONFIG_MAPPING["deepseek_v4"](
        rope_parameters=None if own is None else {"rope_type": "yarn", **own},
        max_position_embeddings=1024,
        num_hidden_layers=4,
    )
    model = empty_model("", config)
    handle = rope_patch.patch(model, method, factor=2.0, kernels="hf", **request_)
    fields = {**config.to_dict(), **rope_patch.export(model, "vllm").config}
    served = AutoConfig.for_model(**fields)
    frequencies = {"main": config.rope_theta ** (-torch.arange(0, 64, 2).double() / 64)}
    frequencies["compress"] = handle.frequencies["compress"].inv_freq
    for kind, ratio in (("main", 0), ("compress", 4), ("compress", 128)):
        with set_current_vllm_config(VllmConfig()):
            rotary = build_deepseek_v4_rope(
                served,
                head_dim=served.head_dim,
                rope_head_dim=served.qk_rope_head_dim,
                max_position_embeddings=served.max_position_embeddings,
                compress_ratio=ratio,
            )
        table = rotary.cos_sin_cache.double()
        assert len(table) == 2048
        angles = torch.outer(torch.arange(2048).double(), frequencies[kind])
        expected = torch.cat([angles.cos(), angles.sin()], -1)
        # In float32, angles of 2,048 are known to 2e-4.
        torch.testing.assert_close(table, expected, atol=3e-4, rtol=0)
