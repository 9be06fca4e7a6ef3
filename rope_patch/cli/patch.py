"""The command `patch`."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import show

logger = logging.getLogger("rope_patch")


def patch(
    *,
    model: options.Model,
    method: str = option(..., "What to apply (`rope-patch methods` lists them)."),
    to: str = option(
        ..., "A new folder for the checkpoint; of a GGUF file, a new file.", metavar="FOLDER|FILE"
    ),
    factor: options.Factor = None,
    length: options.Length = None,
    layers: options.LayerOptions,
    method_option: options.MethodOption = None,
    weights: str = option(
        "link",
        "link: hard links to the checkpoint's files, which take no space and stay when it is "
        "deleted; what writes into one in place changes both. copy: files of their own. Across "
        "disks files are copied.",
    ),
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint that reads further: a new config, the same weights.

    Reads the config only; of a model with a table of positions (GPT-2) the weights, too, which hold
    it. The folder has the weights, the tokenizer and all other files of the
    checkpoint, the rotation in config.json, and rope_patch.json, by which rope_patch knows what was
    done. Of a GGUF file a copy is written whose keys llama.cpp rotates by, without flags. Measure
    what it gains before you serve it: `rope-patch compare`.

    \b
    Examples:
      rope-patch patch demo --method yarn --factor 2 --to smollm2-16k
      rope-patch patch ./my-model --method yarn --length 131072 --to my-model-128k --weights copy
      rope-patch patch my-model.Q4_K_M.gguf --method yarn --factor 4 --to my-model-128k.gguf
    """
    from rope_patch.exporting import patch_gguf
    from rope_patch.pretrained.gguf import split_gguf
    from rope_patch.pretrained.patched_checkpoint import patch_checkpoint
    from rope_patch.pretrained.saving import OTHER_GROWTH
    from rope_patch.transformers_api.remote_code import OPTION, trust_argument

    if weights not in ("link", "copy"):
        raise ValueError(f"--weights must be link or copy, got {weights!r}")
    request = {"factor": factor, "length": length, **layers.arguments()}
    request |= options.parse_options(method_option)
    if split_gguf(model)[1] is not None:
        file = patch_gguf(model, to, method, **request)
        if as_json:
            print(json.dumps(asdict(file) | {"file": str(file.file)}, indent=1))
            return
        name = shlex.quote(str(file.file))
        show(file.summary)
        print(f"wrote {name}: the same weights, and of its keys")
        for key, value in file.keys.items():
            print(f"  {key} " + ("was removed" if value is None else f"= {value}"))
        print(f"llama.cpp rotates by them: llama-server -m {name} -c {file.length}")
        return
    checkpoint = patch_checkpoint(model, to, method, copy=weights == "copy", **request)
    if weights == "link" and any(name.endswith(".safetensors") for name in checkpoint.copied):
        logger.warning("the weights were copied: there are no links from that disk to this one")
    if as_json:
        print(json.dumps(asdict(checkpoint) | {"folder": str(checkpoint.folder)}, indent=1))
        return
    folder = shlex.quote(str(checkpoint.folder))
    trusted = trust_argument()[OPTION]  # the folder has the checkpoint's own code, too
    show(checkpoint.summary)
    print(
        f"wrote {folder}: config.json and rope_patch.json; of the checkpoint's files "
        f"{len(checkpoint.linked)} are linked, {len(checkpoint.copied)} copied"
    )
    if checkpoint.native:
        print("plain transformers loads it; what other engines need:")
        words = f" --{OPTION.replace('_', '-')}" if trusted else ""
        print(f"  rope-patch export {folder} --engine vllm{words}")
    else:
        growth = OTHER_GROWTH if method == "dynamic" else ""
        print(f"no config of transformers says this{growth}; load the folder with")
        words = f", {OPTION}=True" if trusted else ""
        print(f"  rope_patch.load({str(checkpoint.folder)!r}{words})")
