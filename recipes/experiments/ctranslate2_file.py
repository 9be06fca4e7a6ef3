"""Read the variables of a CTranslate2 `model.bin`, without the library.

The layout is the one that CTranslate2's `python/ctranslate2/specs/model_spec.py` writes, little
endian: version, name of the model, its revision, number of variables, and each variable's name,
shape, type and values; then the aliases, names that share another variable's values. Strings have
their length, with the zero at their end, before them.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import torch

from rope_patch.utils.errors import Refused

VERSION = 6
# Types by their number in the file.
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)


def read_variables(path: Path) -> dict[str, torch.Tensor]:
    """Return all variables of a CTranslate2 file, aliases too, in the file's types.

    Raises:
        ValueError: The file is of another version, cut short, or no such file.
    """
    with path.open("rb") as file:
        (version,) = _unpack(file, "I")
        if version != VERSION:
            raise Refused(
                f"{path} has version {version} of CTranslate2's format, expected {VERSION}: "
                "convert the model again with CTranslate2 4"
            )
        _text(file), _unpack(file, "I")  # the model's kind and revision
        variables = {}
        for _ in range(*_unpack(file, "I")):
            name = _text(file)
            shape = _unpack(file, f"{_unpack(file, 'B')[0]}I")
            kind, size = _unpack(file, "BI")
            if kind >= len(TYPES):
                raise Refused(f"{name} in {path} has the unknown type {kind}")
            values = torch.frombuffer(bytearray(_read(file, size)), dtype=TYPES[kind])
            variables[name] = values.reshape(shape)
        for _ in range(*_unpack(file, "I")):
            alias = _text(file)
            variables[alias] = variables[_text(file)]
    return variables


def _read(file: BinaryIO, size: int) -> bytes:
    raw = file.read(size)
    if len(raw) < size:
        raise Refused(f"{file.name} ends {size - len(raw):,} bytes early: download it again")
    return raw


def _unpack(file: BinaryIO, fields: str) -> tuple[int, ...]:
    return struct.unpack(f"<{fields}", _read(file, struct.calcsize(f"<{fields}")))


def _text(file: BinaryIO) -> str:
    return _read(file, *_unpack(file, "H"))[:-1].decode()
