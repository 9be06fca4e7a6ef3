"""The command `methods`."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

import typer

from rope_patch.cli import options
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import VERDICT


def methods(
    name: str | None = argument(None, "Show one method with its options."),
    check: bool = option(
        False,
        "Check NAME on a tiny random Llama that was trained on 64 tokens: causality, chunks, "
        "finite numbers, lengths; the exit code is 1 if something is wrong.",
        "--check",
    ),
    factor: options.Factor = None,
    method_option: options.MethodOption = None,
    as_json: options.Json = False,
) -> None:
    """List the methods, or show one with its paper and options, or check it.

    \b
    Examples:
      rope-patch methods
      rope-patch methods yarn
      rope-patch methods slow-half --plugin my_method.py --check --factor 4
    """
    if check:
        if name is None:
            raise ValueError("--check takes a method: rope-patch methods NAME --check")
        _check(name, as_json, factor=factor, **options.parse_options(method_option))
        return
    if factor is not None or method_option:
        raise ValueError("--factor and --option go with --check, which applies the method")
    from rope_patch.methods import list_methods, registered_methods
    from rope_patch.methods.registry import ENCODING_METHODS, PAGE, find_method, get_method

    if name in ENCODING_METHODS and not find_method(name):
        _show_encoding_method(name, as_json)
        return
    classes = registered_methods() if name is None else {name: get_method(name)}
    rows: list[dict[str, Any]] = [
        {
            "name": key,
            "description": list_methods().get(key, (cls.__doc__ or "").splitlines()[0]),
            "paper": cls.paper,
            "training": cls.training,
            "options": {
                f.name: {
                    "help": f.metadata["help"],
                    "default": "required" if f.default is MISSING else f.default,
                }
                for f in fields(cls)
            },
        }
        for key, cls in classes.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['description']}")
    if name is None:
        print(f"\nFor models that do not rotate ({PAGE}), besides linear and ntk:")
        for key, (extends, description) in ENCODING_METHODS.items():
            print(f"{key:<{width}}  {description} Extends {extends}.")
        print("\n`rope-patch methods NAME` shows a method's paper and options.")
        return
    (row,) = rows
    print(f"{'':<{width}}  {row['paper']}; fine-tuning: {row['training']}")
    for key, about in row["options"].items():
        print(f"{'':<{width}}    {key} (default: {about['default']}): {about['help']}")


def _check(name: str, as_json: bool, **arguments: Any) -> None:
    """Print the proof of a method; exit with 1 if it fails."""
    from rope_patch import check_method

    proof = check_method(name, **arguments)
    print(json.dumps(proof.as_dict(), indent=1, allow_nan=False) if as_json else proof.as_text())
    if not proof.is_ok:
        raise typer.Exit(VERDICT)


def _show_encoding_method(name: str, as_json: bool) -> None:
    """Print a method for models that do not rotate."""
    from rope_patch.methods.registry import ENCODING_METHODS, PAGE

    extends, description = ENCODING_METHODS[name]
    if as_json:
        row = {"name": name, "description": description, "extends": extends, "options": {}}
        print(json.dumps([row], indent=1))
        return
    print(f"{name}  {description}")
    print(f"{'':<{len(name)}}  Extends {extends}; {PAGE} shows how.")
