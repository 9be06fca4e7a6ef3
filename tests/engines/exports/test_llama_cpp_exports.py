"""Test that llama.cpp, with the flags or fields that export prints, rotates as asked.

llama.cpp's own converter makes the GGUF files, with words that stand for token ids in place of a
tokenizer.
"""

from pathlib import Path

import pytest

import rope_patch

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
from export_servers import convert, find_converter, llama_cpp
from helpers.tiny_gguf import write_gguf
from tiny_checkpoints import CASES, LEAST_MARGIN, export_error, print_export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_converter() is None, reason="needs llama.cpp's converter"),
]

# What export prints: flags for a file of the model as it was, fields to convert with, or both.
PRINTED = {
    "Qwen, YaRN in its config": "both",
    "Qwen, yarn": "both",
    "Llama 3.1": "both",
    "Llama 3.1, ntk": "flags",
    "Llama 3, llama3": "fields",
    "Llama 3, per-pair factors": "fields",
    "Phi-3 of one set": "both",
    "Phi-3, yarn": "fields",
    "Gemma 3, linear in its config": "both",
    "Gemma 3, yarn": "both",
    "gpt-oss, truncated yarn": "fields",
    "gpt-oss, abf": "fields",
    "Qwen2.5, abf": "both",
}
REFUSED = {
    "gpt-oss": "its YaRN is always truncated",
    "gpt-oss, yarn": "its YaRN is always truncated",
    "Qwen3, p-RoPE": "a GGUF file has stretches pair by pair for",
}


def verify(case, path, words, folder, log):
    with llama_cpp(path, words, log) as url:
        return case.verify(url, folder)


def require_as_asked(found):
    assert found.status == "as-asked"
    assert found.verdict.margin > LEAST_MARGIN


def test_every_case_is_run_or_refused():
    assert {*PRINTED, *REFUSED} == set(CASES)


@pytest.mark.parametrize("name", [name for name, forms in PRINTED.items() if forms != "fields"])
def test_the_printed_flags_rotate_as_asked(name, folder_of, convertible, tmp_path):
    case = CASES[name]
    folder, path = folder_of(case.checkpoint), tmp_path / "model.gguf"
    printed = print_export(case, folder, "llama.cpp")
    convert(convertible(case.checkpoint), path)
    require_as_asked(verify(case, path, printed.words, folder, tmp_path / "log.txt"))


@pytest.mark.parametrize("name", [name for name, forms in PRINTED.items() if forms != "flags"])
def test_the_printed_fields_rotate_as_asked(name, folder_of, convertible, tmp_path):
    """With the flags, too, where there are any: in a converted file they change nothing."""
    case = CASES[name]
    folder, path = folder_of(case.checkpoint), tmp_path / "model.gguf"
    source = convertible(case.checkpoint)
    printed = print_export(case, source, "llama.cpp", "--write", tmp_path / "to-convert")
    convert(tmp_path / "to-convert", path)
    require_as_asked(verify(case, path, printed.words, folder, tmp_path / "log.txt"))


def test_without_the_printed_flags_the_scaling_is_lost(folder_of, convertible, tmp_path):
    case = CASES["Qwen, yarn"]
    folder, path = folder_of(case.checkpoint), tmp_path / "model.gguf"
    convert(convertible(case.checkpoint), path)
    found = verify(case, path, ["-c", "256"], folder, tmp_path / "log.txt")
    assert found.verdict.explains == ("unscaled",)


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_cannot_rotate_is_refused(name, folder_of):
    case = CASES[name]
    assert REFUSED[name] in export_error(case, folder_of(case.checkpoint), "llama.cpp")


def test_llama_cpp_truncates_the_ramp_of_gpt_oss(folder_of, convertible, tmp_path):
    """The reason of a refusal: what llama.cpp makes of the published config by itself."""
    folder, path = folder_of("gpt-oss"), tmp_path / "model.gguf"
    convert(convertible("gpt-oss"), path)
    with llama_cpp(path, ["-c", "2048"], tmp_path / "log.txt") as url:
        assert CASES["gpt-oss"].verify(url, folder).status != "as-asked"
        assert CASES["gpt-oss, truncated yarn"].verify(url, folder).status == "as-asked"


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk"])
def test_a_patched_file_rotates_without_flags(method, tmp_path):
    tiny, new = Path(__file__).parents[2] / "assets" / "tiny-llama", tmp_path / "new.gguf"
    write_gguf(tiny, tmp_path / "tiny.gguf", 256, quantized=True)
    rope_patch.exporting.patch_gguf(tmp_path / "tiny.gguf", new, method, factor=4)
    with llama_cpp(new, ["-c", "1024"], tmp_path / "log.txt") as url:
        found = rope_patch.verify(url, against=tiny, method=method, factor=4, progress=False)
    assert found.status == "as-asked"
