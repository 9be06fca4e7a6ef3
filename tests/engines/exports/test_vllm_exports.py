"""Test that `vllm serve`, with the words that export prints, rotates as asked, without a plugin."""

import pytest

pytest.importorskip("vllm")
from export_servers import vllm
from tiny_checkpoints import CASES, LEAST_MARGIN, print_export

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", CASES)
def test_the_printed_line_rotates_as_asked(name, folder_of, tmp_path):
    case = CASES[name]
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
