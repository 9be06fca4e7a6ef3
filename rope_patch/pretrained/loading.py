"""Loading through transformers and accelerate, patched, with errors that say what is wrong."""

from __future__ import annotations

import copy
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from rope_patch.methods import registered_methods
from rope_patch.patching import check, patch
from rope_patch.pretrained import demo
from rope_patch.pretrained.adapters import (
    adapter_base,
    is_adapter,
    load_adapter,
    require_same_rotation,
)
from rope_patch.pretrained.device_map import require_device
from rope_patch.pretrained.saving import SIDECAR, read_sidecar, request_from_sidecar
from rope_patch.pretrained.transformers_registry import needs_registration
from rope_patch.rope_config import require_valid_rope_config
from rope_patch.utils.errors import describe_error, is_weights_file_error, one_line, parse_json

# What PEFT takes, and from_pretrained does not.
_ADAPTER_ARGUMENTS = ("adapter_name", "is_trainable", "autocast_adapter_dtype")
_UNKNOWN_CLASS = "Unrecognized configuration class"
_FILE_ERRORS = (OSError, ValueError, SafetensorError, LookupError, AttributeError, ArithmeticError)
_MAX_ERROR_LENGTH = 400  # characters of somebody else's error
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(
    path: str | os.PathLike[str],
    method: str | None = None,
    *,
    factor: float | None = None,
    length: int | None = None,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    kernels: str = "auto",
    start: str = "auto",
    device_map: Any = None,
    dtype: Any = "auto",
    gguf_file: str | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a pretrained model and patches it.

    The request is checked on an empty model first, so nothing large is read for one that fails.
    A folder written by `rope_patch.save` is loaded as it was before the patch, and patched with
    what is asked for, or as recorded if no method is named. A folder with a PEFT adapter gives the
    PEFT model: its base, patched as the adapter was trained, and the adapter on it.

    Args:
        path: A folder, a model's name on the Hub, or `demo` (see `rope_patch.pretrained.demo`).
        method: A name from `rope_patch.list_methods()`.
        factor: See `patch`.
        length: See `patch`.
        trained_length: See `patch`.
        layer_types: See `patch`.
        kernels: See `patch`.
        start: See `patch`.
        device_map: As in transformers: "auto" spreads over GPUs, memory and disk (accelerate).
        dtype: As in transformers; "auto" is what the checkpoint was saved in.
        gguf_file: The GGUF file within `path`, which is expanded to plain weights.
        **kwargs: The method's options, and whatever else `from_pretrained` takes (`max_memory`,
            `revision`, `attn_implementation`, ...). With an adapter they are the base's, but
            `adapter_name`, `is_trainable` and `autocast_adapter_dtype`.

    Returns:
        The patched model, in evaluation mode unless an adapter is to be trained.

    Raises:
        ValueError: No such model, a damaged one, or a request that cannot be met.
    """
    path = demo.resolve_model_path(path) if isinstance(path, str) else path
    adapter = path if is_adapter(path) else None
    said = read_sidecar(path)
    if adapter is not None:
        path, revision = adapter_base(adapter)
        kwargs = {"revision": revision, **kwargs} if revision else kwargs
    for_adapter = {
        k: kwargs.pop(k) for k in _ADAPTER_ARGUMENTS if adapter is not None and k in kwargs
    }
    sidecar = read_sidecar(path)
    said = said or sidecar
    options, kwargs = _split_method_options(method or (said or {}).get("method"), kwargs)
    asked = {
        "factor": factor,
        "length": length,
        "trained_length": trained_length,
        "layer_types": layer_types,
        **options,
    }
    request: dict[str, Any] | None
    if method is None:
        if said is None:
            raise ValueError(
                f"name a method (rope_patch.list_methods() lists them): {adapter or path} has no "
                f"{SIDECAR} that records one"
            )
        given = [name for name, value in asked.items() if value is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)} goes with a method: name it too, or leave all out to get what "
                f"{SIDECAR} records"
            )
        request = {**request_from_sidecar(said), "kernels": kernels}
    else:
        request = {"method": method, **asked, "kernels": kernels, "start": start}
    try:
        if sidecar is None:
            config = read_config(path, gguf_file=gguf_file, **kwargs)
        else:
            config = _original_config(Path(path), sidecar)
        empty = empty_model(path, config)
    except ValueError as error:
        if adapter is None:
            raise
        raise ValueError(
            f"the adapter in {adapter} was trained on {path!r}: {error}; if that lies elsewhere "
            f"now, load it yourself and call rope_patch.load_adapter(model, {str(adapter)!r})"
        ) from error
    recorded = None if said is sidecar else adapter  # it says under what it was trained
    if recorded is not None and method is None:
        needed = require_same_rotation(empty, recorded)
        request = None if needed is None else {**needed, "kernels": kernels}
    else:
        check(empty, **request)
        if recorded is not None:
            patch(empty, **request)
            require_same_rotation(empty, recorded)
    model = read_model(
        path, config=config, device_map=device_map, dtype=dtype, gguf_file=gguf_file, **kwargs
    )
    if request is not None:
        patch(model, **request)
    if adapter is None:
        return model
    if "offload_folder" in kwargs:
        for_adapter["offload_folder"] = kwargs["offload_folder"]
    return load_adapter(model, adapter, **for_adapter)


def read_config(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Reads a model's config.

    Raises:
        ValueError: There is none: says where was looked and what to do.
    """
    _require_folder(path, kwargs.get("gguf_file"))
    try:
        kwargs.pop("max_memory", None)
        return AutoConfig.from_pretrained(path, **kwargs)
    except OSError as error:
        raise _loading_error(path, error) from error
    except RecursionError as error:
        deep = ValueError("the lists or objects in its config are nested too deep")
        raise _loading_error(path, deep) from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        try:
            require_valid_rope_config(PreTrainedConfig.get_config_dict(path)[0])
        except ValueError as found:  # transformers' own words for it are about its code
            raise _loading_error(path, found) from error
        except (OSError, KeyError, TypeError, AttributeError):
            pass
        raise _loading_error(path, error) from error


def read_tokenizer(path: str | os.PathLike[str], *, gguf_file: str | None = None) -> Any:
    """Reads a model's tokenizer.

    Raises:
        ValueError: There is none.
    """
    _require_folder(path, gguf_file)
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoTokenizer.from_pretrained(path, **extra)
    except MemoryError:
        raise
    except Exception as error:  # parsers in Rust and Python, which raise whatever they stumble on
        if gguf_file is None and not _has_tokenizer(path):
            raise ValueError(
                f"cannot load the tokenizer of {path}: the folder has none; save the model's there "
                f"with tokenizer.save_pretrained({str(path)!r})"
            ) from error
        damaged = ValueError(
            f"its files are damaged or of no known kind ({describe_error(error, _MAX_ERROR_LENGTH)})"
        )
        raise _loading_error(path, damaged, what="the tokenizer of ") from error


def empty_model(path: str | os.PathLike[str], config: Any) -> Any:
    """A model without weights, to check requests on: everything is on the meta device.

    Args:
        path: Where the config comes from, for the error.
        config: Any causal language model's.

    Raises:
        ValueError: It is another kind of model's.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except ValueError as error:
        if _UNKNOWN_CLASS in str(error):
            raise _no_decoder_error(path, config) from error
        raise _loading_error(path, _explain_config_error(config, error)) from error
    except KeyError as error:
        if not needs_registration(error.args[0]):
            raise _loading_error(path, _explain_config_error(config, error)) from error
        raise ValueError(
            f"cannot load {path}: its config names the scaling {error.args[0]!r}, which plain "
            "transformers does not know; call rope_patch.register() first"
        ) from error
    except (TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise _loading_error(path, _explain_config_error(config, error)) from error


def _explain_config_error(config: Any, error: Exception) -> Exception:
    """What is wrong with a config's rotation, if that is why no model could be made of it."""
    try:
        text = config.get_text_config(decoder=True)
        if getattr(text, "rope_parameters", None):
            require_valid_rope_config(text.to_dict())
    except ValueError as found:
        return found
    return error


def require_dtype(name: str) -> None:
    """Refuses what is no name of a number format to compute in, before a model is read.

    Raises:
        ValueError: Another name.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")


def read_model(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Reads a model without patching it.

    Args:
        path: A folder, or a model's name on the Hub.
        **kwargs: What `from_pretrained` takes.

    Raises:
        ValueError: There is none, or it is damaged or lacks tensors.
    """
    gguf_file = kwargs.get("gguf_file")
    require_device(kwargs.get("device_map"))
    _require_folder(path, gguf_file)
    if gguf_file is None:
        _require_complete_shards(Path(path))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **kwargs, output_loading_info=True)
        model, report = loaded
    except Exception as error:
        if "mismatched" in str(error):
            sizes = ValueError("its weights are not of the sizes in its config")
            raise _loading_error(path, sizes) from error
        if _UNKNOWN_CLASS in str(error):
            config = kwargs.get("config") or read_config(path, gguf_file=gguf_file)
            raise _no_decoder_error(path, config) from error
        if is_weights_file_error(error):
            broken = ValueError(
                "its .bin file of weights is damaged, or holds code, which is never run "
                f"({type(error).__name__}); download it again, or use safetensors"
            )
            raise _loading_error(path, broken) from error
        if isinstance(error, (*_FILE_ERRORS, RecursionError)):
            raise _loading_error(path, error) from error
        raise  # no memory, say
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"cannot load {path}: its weights lack {len(missing)} tensors that its config asks for "
            f"({', '.join(missing[:2])}{', ...' if len(missing) > 2 else ''}), which would be "
            "random; download it again, or mend its config"
        )
    # A GGUF's weights are dense once read, yet transformers still calls them quantized and refuses
    # to save or train them.
    if gguf_file is not None and (quantizer := getattr(model, "hf_quantizer", None)):
        quantizer.remove_quantization_config(model)
    return model.eval()


def _original_config(folder: Path, sidecar: dict[str, Any]) -> Any:
    """The config that a saved folder's model had before it was patched.

    Put together before transformers reads it: not every version can read every scaling.
    """
    _require_folder(folder, None)
    try:
        said = parse_json((folder / "config.json").read_text())
        said.get("text_config", said).update(sidecar["original"])
        return AutoConfig.for_model(**said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _loading_error(folder, error) from error


def _split_method_options(
    method: str | None, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts the method's options (and what looks like a misspelt one) from the loader's."""
    cls = registered_methods().get(method or "")
    known = list(cls.__dataclass_fields__) if cls else []
    options = {
        key: value
        for key, value in kwargs.items()
        if key in known or get_close_matches(key, known, n=1, cutoff=0.8)
    }
    return options, {key: value for key, value in kwargs.items() if key not in options}


def _require_folder(path: str | os.PathLike[str], gguf_file: str | None) -> None:
    """Refuses what looks like a folder and is not one that holds a model."""
    folder = Path(path)
    if not folder.exists():
        if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1:
            raise ValueError(f"no such folder: {path}")
        return
    if not folder.is_dir():
        raise ValueError(
            f"{path} is a file: expected the folder it is in"
            + (f", with gguf_file={folder.name!r}" if folder.suffix == ".gguf" else "")
        )
    needed = gguf_file or "config.json"
    if not (folder / needed).is_file():
        there = sorted(p.name for p in folder.iterdir())[:5]
        raise ValueError(
            f"{path} holds no {needed}: expected a model's folder, found "
            f"{', '.join(there) or 'nothing'}"
        )


def _require_complete_shards(folder: Path) -> None:
    """Refuses a folder whose safetensors are missing or cut short, before anything is read."""
    if not folder.is_dir():
        return
    index = folder / "model.safetensors.index.json"
    shards = [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else []
    if not shards and index.is_file():
        try:
            names = sorted(set(parse_json(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged ({error}); download it again") from error
        shards = [folder / name for name in names]
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ValueError(
                f"{folder} is incomplete: {len(missing)} of {len(shards)} shards are missing "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); download them "
                "again"
            )
    for shard in shards:
        try:
            with safe_open(shard, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{shard} is cut short or damaged ({error}); download it again"
            ) from error


def _loading_error(path: str | os.PathLike[str], error: Exception, what: str = "") -> ValueError:
    meant = isinstance(error, ValueError | OSError | SafetensorError)  # for a reader, not by chance
    said = (one_line(str(error), _MAX_ERROR_LENGTH) if meant else "") or describe_error(
        error, _MAX_ERROR_LENGTH
    )
    if Path(path).is_dir():
        return ValueError(f"cannot load {what}{path}: {said}")
    return ValueError(
        f"cannot load {what}{str(path)!r}: there is no such folder, and the Hugging Face Hub did "
        f"not give a model of that name ({said}); check the name, the network and "
        "HF_HUB_OFFLINE, or give a local folder"
    )


def _no_decoder_error(path: str | os.PathLike[str], config: Any) -> ValueError:
    """Return the error for a model that AutoModelForCausalLM has no class for."""
    kind = getattr(config, "model_type", type(config).__name__)
    return ValueError(
        f"cannot load {path}: transformers has no plain causal language model of the type "
        f"{kind!r}; if it reads pictures or sound beside text, load it in Python with its own "
        "class and call rope_patch.patch(model, ...). `rope-patch diagnose` reads its config as it "
        "is"
    )


def _has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a model's folder has any file of a tokenizer; True for no folder."""
    folder = Path(path)
    return not folder.is_dir() or any(
        "token" in p.name or p.name.startswith(("vocab", "spiece")) or p.suffix == ".model"
        for p in folder.iterdir()
    )
