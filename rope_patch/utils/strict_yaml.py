"""YAML without its traps: what two readers could take for two things is refused."""

from __future__ import annotations

import re
from typing import Any

import yaml

# YAML 1.1 reads 0400 as 256 and 4:16 as 256; YAML 1.2 and people do not.
_OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """The safe loader, which raises where a key stands twice or a number is not in decimals."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag in _NUMBERS and _OTHER_NUMBER.fullmatch(node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value} is not one number to all readers of YAML: expected decimals, such "
                "as 4096, or quotes around a text",
                node.start_mark,
            )
        return super().construct_object(node, deep)


def read_yaml(text: str) -> Any:
    """Return what YAML says.

    Raises:
        yaml.YAMLError: It is no YAML, says something twice or in a form that readers take
            differently, or is nested too deep.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("its lists or keys are nested too deep") from error
    except ValueError as error:  # a date or number out of range
        raise yaml.YAMLError(str(error)) from error
