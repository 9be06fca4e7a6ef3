"""Python code that a checkpoint brings: whether loading may execute it, and which code a model has.

transformers takes `trust_remote_code` for the config, the tokenizer and the model, each by itself,
and asks the terminal where it is left out. A call of this package loads all three, often several
times. So the permission holds for a call: `remote_code` (or `takes_remote_code` around a function)
gives it, and everything that is loaded meanwhile passes `trust_argument()`, which is False without
it. A thread or process that the call starts does not inherit the permission.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

from rope_patch.utils.errors import Refused, one_line

logger = logging.getLogger("rope_patch")

OPTION = "trust_remote_code"
_is_trusted: ContextVar[bool] = ContextVar("remote_code_is_trusted", default=False)

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def remote_code(model: Any, trusted: bool) -> Iterator[None]:
    """Let loading execute the code that a checkpoint brings, within a block.

    Args:
        model: The checkpoint's folder or name, for the warning.
        trusted: Whether it may. False changes nothing: a block around this one decides.

    Raises:
        TypeError: `trusted` is neither True nor False.
    """
    if not isinstance(trusted, bool):
        raise TypeError(f"{OPTION} must be True or False, got {trusted!r}")
    if not trusted or _is_trusted.get():
        yield
        return
    logger.warning(
        "%s is on: Python code that comes with %s is executed, with all rights of this process",
        OPTION,
        model if isinstance(model, str | os.PathLike) else "the model",
    )
    token = _is_trusted.set(True)
    try:
        yield
    finally:
        _is_trusted.reset(token)


def takes_remote_code(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function that loads a model, so that its `trust_remote_code` holds for all of it.

    The first parameter is the model or its path, or a request with `model` and `trust_remote_code`.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself says what is wrong
            return function(*args, **kwargs)
        model: Any = given.get(first)
        trusted: Any = kwargs.get(OPTION, getattr(model, OPTION, False))
        with remote_code(getattr(model, "model", model), trusted):
            return function(*args, **kwargs)

    return call


def trust_argument() -> dict[str, bool]:
    """Return `trust_remote_code` for transformers, which must never be left out: it would ask."""
    return {OPTION: _is_trusted.get()}


def code_refusal(path: Any, error: Exception) -> Refused | None:
    """Return a better error for a checkpoint whose own code was not, or could not be, executed.

    Args:
        path: The checkpoint's folder or name.
        error: What loading raised.
    """
    if OPTION in str(error):
        return _untrusted(path)
    if _is_trusted.get() and isinstance(error, ImportError):
        return Refused(
            f"cannot load {path}: its own code imports what is not here ({one_line(str(error))}): "
            "install it, or the release of transformers that the code was written for"
        )
    return None


def _untrusted(path: Any) -> Refused:
    return Refused(
        f"cannot load {path}: it brings Python code of its own, which is executed only on request. "
        f"Read that code (*.py beside config.json), then give {OPTION}=True, or "
        f"--{OPTION.replace('_', '-')} in a command"
    )


def config_from_fields(path: str | os.PathLike[str], fields: dict[str, Any]) -> Any:
    """Return the config of a checkpoint with other fields than its config.json has.

    Args:
        path: The checkpoint's folder or name, where the code of its config is.
        fields: All fields, with `model_type`.

    Raises:
        ValueError: Its class is the checkpoint's own, and its code may not be executed; or there is
            no such class.
        KeyError: The fields name no `model_type`.
    """
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    reference = (fields.get("auto_map") or {}).get("AutoConfig")
    if reference is None or (not _is_trusted.get() and fields.get("model_type") in CONFIG_MAPPING):
        others = {name: value for name, value in fields.items() if name != "model_type"}
        return AutoConfig.for_model(fields["model_type"], **others)
    if not _is_trusted.get():
        raise _untrusted(path)
    config_class: Any = get_class_from_dynamic_module(reference, path)
    config_class.register_for_auto_class()  # so that the config is saved with its code
    config = config_class.from_dict(fields)
    config.name_or_path = str(path)  # where the model's code is looked for
    return config


def own_auto_class(config: Any, names: tuple[str, ...]) -> str | None:
    """Return the first auto class for which a config names code that may be executed, or None.

    Args:
        config: A model's config.
        names: Auto classes, the preferred one first.
    """
    known = getattr(config, "auto_map", None) or {}
    return next((name for name in names if name in known), None) if _is_trusted.get() else None


class CodeIdentity(TypedDict, total=False):
    """What tells apart the code of models; empty for classes of installed packages.

    Attributes:
        code: The digest of the files that came with a checkpoint and were executed.
    """

    code: str


def code_identity(model: Any) -> CodeIdentity:
    """Return the digest of a model's own code, to record with what depends on it."""
    files = _own_files(model)
    if not files:
        return {}
    digest = hashlib.sha256()
    folders = {file.parent for file in files}
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return {"code": f"sha256:{digest.hexdigest()[:32]}"}


def require_current_code(path: Any, model: Any) -> None:
    """Raise if a model's class is of code that its folder had before it was edited.

    transformers keeps a model's class for as long as Python runs, where its config's code stays.
    """
    for file in _own_files(model):
        source = Path(path) / file.name
        if source.is_file() and source.read_bytes() != file.read_bytes():
            raise Refused(
                f"{source} was changed after this process loaded it, and transformers goes on with "
                "the code from before: start Python again"
            )


def _own_files(model: Any) -> set[Path]:
    """Return the files of the classes of a model's modules that came with a checkpoint."""
    from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

    names = {type(module).__module__ for module in model.modules()}
    own = [name for name in names if name.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")]
    return {Path(str(sys.modules[name].__file__)) for name in own if name in sys.modules}
