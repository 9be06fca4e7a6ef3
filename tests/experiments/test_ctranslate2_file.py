"""Files written here by CTranslate2's specification are read back, value by value."""

import struct

import ctranslate2_file
import pytest
import torch

from rope_patch.utils.errors import Refused

# Type numbers of CTranslate2's include/ctranslate2/types.h.
NUMBERS = {
    torch.float32: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.float16: 4,
    torch.bfloat16: 5,
}


def text(string):
    return struct.pack("<H", len(string) + 1) + string.encode() + b"\0"


def write(path, variables, aliases, version=6):
    """Write a file as CTranslate2's `ModelSpec._serialize` does."""
    parts = [struct.pack("<I", version), text("WhisperSpec"), struct.pack("<I", 3)]
    parts.append(struct.pack("<I", len(variables)))
    for name, values in variables.items():
        raw = values.contiguous().view(torch.uint8).numpy().tobytes() if values.ndim else None
        raw = raw or values.numpy().tobytes()
        parts += [text(name), struct.pack("<B", values.ndim)]
        parts += [struct.pack("<I", size) for size in values.shape]
        parts += [struct.pack("<BI", NUMBERS[values.dtype], len(raw)), raw]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [text(alias) + text(name) for alias, name in aliases.items()]
    path.write_bytes(b"".join(parts))


@pytest.fixture
def variables():
    torch.manual_seed(0)
    numbers = torch.randn(3, 4) * 50
    found = {f"decoder/{dtype}": numbers.to(dtype) for dtype in NUMBERS}
    return found | {"decoder/num_heads": torch.tensor(6, dtype=torch.int16)}


def test_every_type_and_alias_is_read(tmp_path, variables):
    write(tmp_path / "model.bin", variables, {"decoder/projection": "decoder/torch.float16"})
    read = ctranslate2_file.read_variables(tmp_path / "model.bin")
    assert read.keys() == {*variables, "decoder/projection"}
    for name, values in variables.items():
        assert read[name].dtype == values.dtype
        assert torch.equal(read[name], values)
    assert torch.equal(read["decoder/projection"], variables["decoder/torch.float16"])


@pytest.mark.parametrize("left", [3, 40, 200])
def test_a_file_that_is_cut_short_is_refused(tmp_path, variables, left):
    path = tmp_path / "model.bin"
    write(path, variables, {})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(Refused, match="bytes early"):
        ctranslate2_file.read_variables(path)


def test_another_version_is_refused(tmp_path, variables):
    write(tmp_path / "model.bin", variables, {}, version=5)
    with pytest.raises(Refused, match=r"version 5 .* expected 6"):
        ctranslate2_file.read_variables(tmp_path / "model.bin")
