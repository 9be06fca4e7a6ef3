"""The command `export`."""

from __future__ import annotations

import logging
import shlex
from typing import Any

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import show, show_result

logger = logging.getLogger("rope_patch")


def export(
    model: options.Model,
    engine: str = option(
        ...,
        "transformers (5), transformers4, vllm, sglang, llama.cpp, mlx (mlx-lm) or mlx-vlm; or the "
        "trainers axolotl and llama-factory.",
    ),
    method: str | None = option(
        None, "What to apply; else what the model's own config or rope_patch.json says."
    ),
    factor: options.Factor = None,
    length: options.Length = None,
    trained_length: options.TrainedLength = None,
    start: options.Start = "auto",
    anyway: options.Anyway = False,
    method_option: options.MethodOption = None,
    found: str | None = option(
        None, "What to apply: the folder of a `rope-patch search`, not a method."
    ),
    write: str | None = option(
        None,
        "Make this folder for llama.cpp's converter: links to the model's files, with the fields, "
        "and the stretches pair by pair if there are any.",
        metavar="FOLDER",
    ),
    as_json: options.Json = False,
) -> None:
    """Show what makes another engine rotate alike.

    Prints config fields and words for its command line. What the engine would read otherwise is
    said in a form that it reads alike, or refused with the reason. Reads the config only, no
    weights, and writes nothing unless asked to.

    \b
    Examples:
      rope-patch export demo --engine vllm --method yarn --factor 4
      rope-patch export path/of/a/saved/patch --engine llama.cpp
      rope-patch export ./my-model --engine llama.cpp --found out/search --write out/to-convert
    """
    from rope_patch import patch
    from rope_patch.encodings.replacement.encoding import rotation_refusal
    from rope_patch.exporting import export, require_engine, write_folder
    from rope_patch.pretrained import demo
    from rope_patch.searching.search_result import SearchResult, export_for
    from rope_patch.utils import atomic_files

    require_engine(engine)
    if write is not None:
        atomic_files.require_new_folder(write, "the converter's files")
    path = demo.resolve_model_path(model)
    request: dict[str, Any] = {"factor": factor, "length": length, "trained_length": trained_length}
    request |= options.parse_options(method_option)
    method_keywords = [name for name, value in request.items() if value is not None]
    if found is not None and (method is not None or method_keywords):
        raise ValueError("--found says it all: leave --method and what goes with it out")
    search_result = None if found is None else SearchResult.load(found)
    is_as_saved = method is None and found is None
    meta_model = _meta_model(path, engine, is_as_saved, start, trained_length)
    if method is not None:
        kernels = "hf" if rotation_refusal(meta_model) is None else "auto"
        patch(meta_model, method, start=start, kernels=kernels, anyway=anyway, **request)
    elif method_keywords:
        raise ValueError(
            f"{', '.join(method_keywords)} goes with a method: name it too, with --method"
        )
    exported_form = (
        export(meta_model, engine)
        if search_result is None
        else export_for(search_result, engine, meta_model.config)
    )
    if write is not None:
        write_folder(exported_form, path, write)
        logger.info("for llama.cpp's converter: %s", write)
    show_result(exported_form, as_json)
    if engine == "vllm" and not as_json:
        show(f"  to type:\n    {shlex.join(['vllm', 'serve', path, *exported_form.arguments])}")


def _meta_model(
    path: str, engine: str, patched: bool, start: str, trained_length: int | None
) -> Any:
    """Return a model without weights, with the patch that it was saved with, or without."""
    from rope_patch.pretrained.loading import empty_model, read_config, read_original_config
    from rope_patch.pretrained.sidecar import SIDECAR, read_sidecar

    sidecar = read_sidecar(path)
    if patched and sidecar is not None and not sidecar.get("native"):
        raise ValueError(
            f"{engine} cannot run {path} as it was saved: {SIDECAR} there names "
            f"{sidecar['method']}, and config.json does not; load it with rope_patch.load, or name "
            "another --method"
        )
    config = read_config(path) if patched else read_original_config(path, start, trained_length)
    return empty_model(path, config, any_kind=True)
