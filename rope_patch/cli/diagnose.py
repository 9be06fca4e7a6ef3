"""The command `diagnose`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import show_result

logger = logging.getLogger("rope_patch")


@dataclass(frozen=True)
class _LayerOptions(options.LayerOptions):
    """Which layers are looked at, and from which rotation."""

    layer_types: str | None = option(
        None, "Which layers to look at, by commas; those that see far."
    )


def diagnose(
    *,
    model: options.Model,
    method: str = option("default", "What to apply; `default` shows the rotation as it is."),
    factor: options.Factor = None,
    length: options.Length = None,
    layers: _LayerOptions,
    method_option: options.MethodOption = None,
    gguf_file: options.GGUF = None,
    picture: Path | None = option(
        None, "Draw every pair's wavelength, before and after, into this .svg or .png file."
    ),
    as_json: options.Json = False,
) -> None:
    """Check a model's rotation, and say what a length needs.

    Says whether transformers does what the config says. Findings come first, each with its number
    and the line that puts it right; then a recommendation; then every rotated pair: its wavelength,
    its turns in training, what a method does to it. A pair that never completed a turn in training
    meets new angles beyond the trained length; the first of them is the critical dimension. Reads
    configs only, no weights. MODEL may also be a folder with a PEFT adapter.

    \b
    Examples:
      rope-patch diagnose demo --length 16384
      rope-patch diagnose demo --method yarn --factor 2 --picture yarn.svg
    """
    from rope_patch.diagnosing.pipeline import diagnose_subject
    from rope_patch.diagnosing.subject import open_subject
    from rope_patch.extension import Extension
    from rope_patch.utils import atomic_files
    from rope_patch.utils.figures import require_plot_suffix

    if picture is not None:
        require_plot_suffix(picture)
        atomic_files.require_writable_file(picture, "the picture", folder_exists=True)
    subject = open_subject(model, gguf_file=gguf_file, display_name=model)
    extension = Extension(
        method,
        factor=factor,
        length=length,
        **layers.arguments(),
        options=options.parse_options(method_option),
    )
    diagnosis = diagnose_subject(subject, extension)
    show_result(diagnosis, as_json)
    if picture is not None:  # last: a library or a folder that is missing costs no diagnosis
        diagnosis.plot(picture)
        logger.info("picture: %s", picture)
