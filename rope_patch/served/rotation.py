"""How a server rotates: found out before it is evaluated, or why it was not."""

from __future__ import annotations

import logging
from pathlib import Path

from rope_patch.evaluation.request import EvalRequest
from rope_patch.evaluation.results_schema import RotationRecord
from rope_patch.served.request import ServedRequest
from rope_patch.served.server import Server
from rope_patch.utils import provenance
from rope_patch.verifying import verify
from rope_patch.verifying.clients import CannotReach, CannotVerify

logger = logging.getLogger("rope_patch")

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def rotation_of(
    server: Server, tokenizer: str, request: EvalRequest, served: ServedRequest
) -> RotationRecord:
    """Return how a server rotates, by `rope_patch.verify`, or why that is not known.

    Args:
        server: The server.
        tokenizer: The tokenizer's folder or name.
        request: What is evaluated; says how weights are loaded.
        served: Says whether to verify, and against what.

    Raises:
        CannotReach: The server does not answer any more.
    """
    against = tokenizer if served.against is None else served.against
    reason = "--no-verify" if not served.verify else _no_weights(against, request, served)
    verification = None
    if reason is None:
        try:
            verification = verify(
                server.url,
                against=against,
                served_model=server.model,
                dtype=request.dtype,
                device_map=request.device_map,
                gguf_file=request.gguf_file,
            )
        except CannotReach:
            raise
        except ValueError as error:  # of weights that cannot be read, too
            if served.against is not None and not isinstance(error, CannotVerify):
                raise  # they were asked for by name
            reason = str(error)
    if verification is None:
        text = f"not verified: {reason}"
        logger.warning("how the server rotates is %s", text)
        return {"rotation": text, "rotates_as_asked": None, "verification": None}
    text = str(verification).partition("\n")[0]
    log = logger.info if verification else logger.warning
    log("%s", text)
    return {
        "rotation": text,
        "rotates_as_asked": {"as-asked": True, "another": False}.get(verification.status),
        "verification": verification.to_dict(),
    }


def _no_weights(against: str, request: EvalRequest, served: ServedRequest) -> str | None:
    """Return why there are no weights to verify against; None if there are some."""
    if served.against is not None:
        return None
    folder = Path(against)
    names = [request.gguf_file] if request.gguf_file else _WEIGHTS
    files = [file for name in names for file in folder.glob(name)] if folder.is_dir() else []
    if not files:
        return f"no weights are at hand in {against}; name them by --against MODEL"
    size, memory = sum(file.stat().st_size for file in files), provenance.hardware()["memory"]
    if memory is not None and size > memory:
        return (
            f"the weights in {against} take {size / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB"
        )
    return None
