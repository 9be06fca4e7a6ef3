"""Load patched models through transformers and accelerate, with errors that help."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
)

from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.entry_points import check, check_encoding, patch
from rope_patch.extension import Extension
from rope_patch.methods.registry import find_method
from rope_patch.original_config import FIELD, TRAINED, original_fields
from rope_patch.pretrained import demo
from rope_patch.pretrained.adapters import (
    adapter_base,
    is_adapter,
    load_adapter,
    require_same_rotation,
)
from rope_patch.pretrained.device_map import require_device
from rope_patch.pretrained.encoding_checkpoint import (
    is_encoding_sidecar,
    read_encoded,
    restore_encoded,
    restore_tables,
    unencoded_config,
    unpatch_loaded,
)
from rope_patch.pretrained.gguf import (
    announce_size,
    apply_gguf_rotation,
    dense_options,
    split_gguf,
    unmark_quantized,
)
from rope_patch.pretrained.sidecar import (
    SIDECAR,
    adapter_start,
    extension_from_sidecar,
    mark_trained,
    read_sidecar,
    recorded_field,
    require_recorded,
)
from rope_patch.pretrained.transformers_registry import needs_registration
from rope_patch.rope_config import require_valid_rope_config
from rope_patch.transformers_api.models import (
    fetched_file,
    image_text_model_classes,
    text_model_classes,
)
from rope_patch.transformers_api.remote_code import (
    code_refusal,
    config_from_fields,
    own_auto_class,
    require_current_code,
    takes_remote_code,
    trust_argument,
)
from rope_patch.utils.errors import (
    Refused,
    describe_error,
    is_weights_file_error,
    one_line,
    parse_json,
)

# Arguments of PEFT that from_pretrained lacks.
_ADAPTER_ARGUMENTS = ("adapter_name", "is_trainable", "autocast_adapter_dtype")
# Arguments that say where a config is.
_HUB_ARGUMENTS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
)
_UNKNOWN_CLASS = "Unrecognized configuration class"
_FILE_ERRORS = (
    OSError,
    ValueError,
    SafetensorError,
    LookupError,
    AttributeError,
    ArithmeticError,
    ImportError,
)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@takes_remote_code
def load(
    path: str | os.PathLike[str],
    method: str | Extension | None = None,
    *,
    factor: float | str | None = None,
    length: int | str | None = None,
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    kernels: str = "auto",
    start: str = "auto",
    anyway: bool = False,
    device_map: Any = None,
    dtype: Any = "auto",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a pretrained model and patch it.

    The request is checked on an empty model first, so nothing large is read for an invalid one.
    A folder written by `rope_patch.save` is loaded as it was before the patch, or as it was trained
    under the patch, and patched as requested; or as recorded, if no method is named. Where its
    method is somebody else's and not known here, it rotates by the recorded frequencies, and a
    warning says so. A folder of a model that `rope_patch.encode` changed gets its encoding back,
    and needs no method. A folder with a PEFT adapter returns the PEFT model: its base, patched as
    in the adapter's training, with the adapter.

    Args:
        path: A folder, a GGUF file, a model's name on the Hub, or `demo` (see
            `rope_patch.pretrained.demo`).
        method: A name from `rope_patch.list_methods()`, or a whole request, an `Extension`.
        factor: See `patch`.
        length: See `patch`.
        trained_length: See `patch`.
        layer_types: See `patch`.
        kernels: See `patch`.
        start: See `patch`.
        anyway: See `patch`.
        device_map: As in transformers: "auto" spreads over GPUs, memory and disk (accelerate).
        dtype: As in transformers; "auto" is the checkpoint's dtype.
        gguf_file: The GGUF file within `path`, which is expanded to plain weights.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        **kwargs: The method's options, and other arguments of `from_pretrained` (`max_memory`,
            `revision`, `attn_implementation`, ...). With an adapter they are for the base, except
            `adapter_name`, `is_trainable` and `autocast_adapter_dtype`.

    Returns:
        The patched model, in evaluation mode unless an adapter is trainable.

    Raises:
        ValueError: The model does not exist, is damaged, or cannot be patched as requested.
    """
    path = demo.resolve_model_path(path) if isinstance(path, str) else path
    encoded = read_encoded(path)
    adapter = path if is_adapter(path) else None
    patch_sidecar = None if encoded is None else encoded["extension"]
    if adapter is not None:
        if encoded is None:
            patch_sidecar = read_sidecar(adapter)
        path, revision = adapter_base(adapter)
        kwargs = {"revision": revision, **kwargs} if revision else kwargs
    adapter_kwargs = {
        k: kwargs.pop(k) for k in _ADAPTER_ARGUMENTS if adapter is not None and k in kwargs
    }
    sidecar = read_sidecar(path) if encoded is None else None
    patch_sidecar = patch_sidecar or sidecar
    name = method.method if isinstance(method, Extension) else method
    options, kwargs = _split_method_options(name or (patch_sidecar or {}).get("method"), kwargs)
    arguments = {
        "factor": factor,
        "length": length,
        "trained_length": trained_length,
        "layer_types": layer_types,
        **options,
    }
    extension: Extension | None = None
    if method is not None:
        extension = Extension.of(method, **arguments, kernels=kernels, start=start, anyway=anyway)
    elif patch_sidecar is None and encoded is None:
        raise Refused(
            f"name a method (rope_patch.list_methods() lists them): {adapter or path} has no "
            f"{SIDECAR} that records one"
        )
    elif names := [name for name, value in arguments.items() if value is not None]:
        raise Refused(
            f"{', '.join(names)} goes with a method: name it too, or leave all out to get what "
            f"{SIDECAR} records"
        )
    elif patch_sidecar is not None:
        extension = replace(extension_from_sidecar(patch_sidecar), kernels=kernels)
    loading = {"device_map": device_map, "dtype": dtype, "gguf_file": gguf_file, **kwargs}
    if encoded is not None:
        config = unencoded_config(path, encoded)
        restore_encoded(empty_model(path, config), encoded, extension)
        model = read_model(path, config=config, **loading)
        restore_encoded(model, encoded, extension, path)
        return model
    assert extension is not None
    try:
        if method is None and sidecar is not None and patch_sidecar is sidecar:
            config = _recorded_config(Path(path), sidecar)
        else:
            config = read_original_config(
                path, extension.start, extension.trained_length, gguf_file=gguf_file, **kwargs
            )
        empty = empty_model(path, config, any_kind=True)
    except ValueError as error:
        if adapter is None:
            raise
        raise Refused(
            f"the adapter in {adapter} was trained on {path!r}: {error}; if that lies elsewhere "
            f"now, load it yourself and call rope_patch.load_adapter(model, {str(adapter)!r})"
        ) from error
    trained_adapter = None if patch_sidecar is sidecar else adapter  # has a sidecar of its own
    if trained_adapter is not None and method is None:
        extension = require_same_rotation(empty, trained_adapter)
        extension = extension and replace(extension, kernels=kernels)
    else:
        if check_encoding(empty, extension) is None:
            plan = check(empty, extension)
            if method is None and patch_sidecar is not None:
                require_recorded(plan, patch_sidecar)
        if trained_adapter is not None:
            with patch(empty, extension):
                require_same_rotation(empty, trained_adapter)
    tables = {}
    if sidecar is not None and is_encoding_sidecar(sidecar):
        model = read_model(path, any_kind=True, **loading)
        tables = unpatch_loaded(model, empty, Path(path), sidecar)
    else:
        model = read_model(path, config=config, any_kind=True, **loading)
    if extension is not None:
        if trained_adapter is not None and patch_sidecar is not None:
            adapter_start(model, patch_sidecar).pop_all()
        handle = patch(model, extension)
        if method is None and trained_adapter is None and isinstance(handle, EncodingPatch):
            restore_tables(handle, tables)
        if method is None and trained_adapter is None and _was_trained(Path(path)):
            mark_trained(model)
    if adapter is None:
        return model
    if "offload_folder" in kwargs:
        adapter_kwargs["offload_folder"] = kwargs["offload_folder"]
    return load_adapter(model, adapter, **adapter_kwargs)


def read_config(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Read a model's config, with the record of a folder that `save` wrote.

    Raises:
        ValueError: It does not exist or is invalid; says where it was looked for and what to do.
    """
    source, gguf_file = split_gguf(path, kwargs.pop("gguf_file", None))
    require_model_folder(source, gguf_file)
    kwargs |= {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        kwargs.pop("max_memory", None)
        config = AutoConfig.from_pretrained(source, **kwargs, **trust_argument())
    except (OSError, ImportError) as error:
        raise loading_error(path, error) from error
    except RecursionError as error:
        cause = ValueError("the lists or objects in its config are nested too deep")
        raise loading_error(path, cause) from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        try:
            file = Path(source) / "config.json"  # transformers assumes that it holds an object
            is_here = file.is_file()
            require_valid_rope_config(
                parse_json(file.read_text())
                if is_here
                else PreTrainedConfig.get_config_dict(source)[0]
            )
        except ValueError as cause:  # transformers' own message is about its code
            raise loading_error(path, cause) from error
        except (OSError, KeyError, TypeError, AttributeError):
            pass
        raise loading_error(path, error) from error
    text = config.get_text_config(decoder=True)
    if gguf_file is not None:
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        apply_gguf_rotation(config, fetched_file(str(source), gguf_file, **hub))
    elif field := recorded_field(Path(path), vars(text)):
        setattr(text, FIELD, field)
    return config


def read_original_config(
    path: str | os.PathLike[str],
    start: str = "auto",
    trained_length: int | None = None,
    **kwargs: Any,
) -> Any:
    """Read the config that an extension of a model starts from; see `original_config`.

    Args:
        path: A folder, which `save` may have written, or a model's name on the Hub.
        start: See `patch`.
        trained_length: See `patch`.
        **kwargs: Arguments of `from_pretrained`.

    Raises:
        ValueError: See `read_config`.
    """
    sidecar = read_sidecar(path)
    if sidecar is None:
        return read_config(path, **kwargs)
    if is_encoding_sidecar(sidecar):
        return _recorded_config(Path(path), sidecar)
    folder = Path(path)

    def restart(text: dict[str, Any]) -> None:
        field = recorded_field(folder, text)
        assert field is not None  # the sidecar has it where the config has none
        values = original_fields(text, field, start, trained_length)
        text.pop(FIELD, None)
        text.update(values)

    return _changed_config(folder, restart)


def read_tokenizer(path: str | os.PathLike[str], *, gguf_file: str | None = None) -> Any:
    """Read a model's tokenizer.

    Raises:
        ValueError: It does not exist or is damaged.
    """
    source, gguf_file = split_gguf(path, gguf_file)
    require_model_folder(source, gguf_file)
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoTokenizer.from_pretrained(source, **extra, **trust_argument())
    except MemoryError:
        raise
    except Exception as error:  # tokenizers' parsers raise errors of any type
        if (refusal := code_refusal(path, error)) is not None:
            raise refusal from error
        if gguf_file is None and not has_tokenizer(path):
            raise Refused(
                f"cannot load the tokenizer of {path}: the folder has none; save the model's there "
                f"with tokenizer.save_pretrained({str(path)!r})"
            ) from error
        reason = describe_error(error, MAX_LENGTH)
        cause = ValueError(f"its files are damaged or of no known kind ({reason})")
        raise loading_error(path, cause, what="the tokenizer of ") from error


def empty_model(path: str | os.PathLike[str], config: Any, *, any_kind: bool = False) -> Any:
    """Build a model without weights, on the meta device, to check requests on.

    Args:
        path: Source of the config, for the error.
        config: The config of a model that generates text.
        any_kind: Build an encoder, or an encoder with a decoder, too; see `auto_class`.

    Raises:
        ValueError: It is another kind of model's config, or invalid.
    """
    try:
        with torch.device("meta"):
            kind = auto_class(config, any_kind=any_kind)
            model = kind.from_config(copy.deepcopy(config), **trust_argument())
    except ValueError as error:
        if _UNKNOWN_CLASS in str(error):
            raise no_decoder_error(path, config) from error
        raise loading_error(path, _explain_config_error(config, error)) from error
    except KeyError as error:
        if not needs_registration(error.args[0]):
            raise loading_error(path, _explain_config_error(config, error)) from error
        raise Refused(
            f"cannot load {path}: its config names the scaling {error.args[0]!r}, which plain "
            "transformers does not know; call rope_patch.register_rope_types() first"
        ) from error
    except (TypeError, AttributeError, RuntimeError, ArithmeticError, ImportError) as error:
        raise loading_error(path, _explain_config_error(config, error)) from error
    require_current_code(path, model)
    return model


def _explain_config_error(config: Any, error: Exception) -> Exception:
    """Return a better error if the config's RoPE fields are invalid, else `error`."""
    try:
        text = config.get_text_config(decoder=True)
        if getattr(text, "rope_parameters", None):
            require_valid_rope_config(text.to_dict())
    except ValueError as cause:
        return cause
    return error


def require_dtype(name: str) -> None:
    """Raise unless `name` is a supported dtype, before a model is read.

    Raises:
        ValueError: It is another name.
    """
    if name not in _DTYPES:
        raise Refused(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")


def read_model(path: str | os.PathLike[str], *, any_kind: bool = False, **kwargs: Any) -> Any:
    """Read a model without patching it.

    Args:
        path: A folder, a GGUF file, or a model's name on the Hub.
        any_kind: Read an encoder, or an encoder with a decoder, too; see `auto_class`.
        **kwargs: Arguments of `from_pretrained`.

    Raises:
        ValueError: The model does not exist, is damaged or lacks tensors.
    """
    source, gguf_file = split_gguf(path, kwargs.pop("gguf_file", None))
    require_device(kwargs.get("device_map"))
    require_model_folder(source, gguf_file)
    if gguf_file is None:
        require_complete_shards(Path(source))
    config = kwargs.get("config")
    if config is None:
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        config = read_config(source, **hub, gguf_file=gguf_file)
        kwargs["config"] = config
    if gguf_file is not None and (file := Path(source) / gguf_file).is_file():
        announce_size(file, kwargs.get("dtype"))
    try:
        loaded: Any = auto_class(config, any_kind=any_kind).from_pretrained(
            source,
            **{**kwargs, **dense_options(gguf_file), **trust_argument()},
            output_loading_info=True,
        )
        model, report = loaded
    except Exception as error:
        if "mismatched" in str(error):
            cause = ValueError("its weights are not of the sizes in its config")
            raise loading_error(path, cause) from error
        if _UNKNOWN_CLASS in str(error):
            raise no_decoder_error(path, config) from error
        if is_weights_file_error(error):
            cause = ValueError(
                "its .bin file of weights is damaged, or holds code, which is never run "
                f"({type(error).__name__}); download it again, or use safetensors"
            )
            raise loading_error(path, cause) from error
        if isinstance(error, (*_FILE_ERRORS, RecursionError)):
            raise loading_error(path, error) from error
        raise  # such as no memory
    if missing := sorted(report["missing_keys"]):
        raise Refused(
            f"cannot load {path}: its weights lack {len(missing)} tensors that its config asks for "
            f"({', '.join(missing[:2])}{', ...' if len(missing) > 2 else ''}), which would be "
            "random; download it again, or mend its config"
        )
    require_current_code(path, model)
    if gguf_file is not None:
        unmark_quantized(model)
    return model.eval()


def _recorded_config(folder: Path, sidecar: dict[str, Any]) -> Any:
    """Return the config of a saved folder's model that its recorded patch extends."""

    def restore(text: dict[str, Any]) -> None:
        text.pop(FIELD, None)
        text.update(sidecar["original"])

    return _changed_config(folder, restore)


def _was_trained(folder: Path) -> bool:
    """Return whether a saved folder's weights were trained under its patch."""
    if is_encoding_sidecar(read_sidecar(folder)):
        return False
    fields = parse_json((folder / "config.json").read_text())
    field = recorded_field(folder, fields.get("text_config", fields))
    return bool(field and field.get(TRAINED))


def _changed_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Any:
    """Return the config of a saved folder with changes to its text part."""
    require_model_folder(folder, None)
    try:
        fields = parse_json((folder / "config.json").read_text())
        change(fields.get("text_config", fields))  # before: not all releases read every scaling
        return config_from_fields(folder, fields)
    except Refused:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise loading_error(folder, error) from error


def _split_method_options(
    method: str | None, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the method's options, and likely misspellings of them, from the loader's."""
    cls = find_method(method) if method else None
    names = list(cls.__dataclass_fields__) if cls else []
    options = {
        key: value
        for key, value in kwargs.items()
        if key in names or get_close_matches(key, names, n=1, cutoff=0.8)
    }
    return options, {key: value for key, value in kwargs.items() if key not in options}


MAX_LENGTH = 400  # characters of another library's error


def loading_error(path: str | os.PathLike[str], error: Exception, what: str = "") -> ValueError:
    """Return the error for a checkpoint that another library could not read."""
    if (refusal := code_refusal(path, error)) is not None:
        return refusal
    is_readable = isinstance(error, ValueError | OSError | SafetensorError)  # written for readers
    message = (one_line(str(error), MAX_LENGTH) if is_readable else "") or describe_error(
        error, MAX_LENGTH
    )
    if Path(path).exists():
        return ValueError(f"cannot load {what}{path}: {message}")
    return ValueError(
        f"cannot load {what}{str(path)!r}: there is no such folder, and the Hugging Face Hub did "
        f"not give a model of that name ({message}); check the name, the network and "
        "HF_HUB_OFFLINE, or give a local folder"
    )


def no_decoder_error(path: str | os.PathLike[str], config: Any) -> ValueError:
    """Return the error for a model that `auto_class` finds no class for."""
    model_type = getattr(config, "model_type", type(config).__name__)
    return ValueError(
        f"cannot load {path}: transformers has no causal language model of the type "
        f"{model_type!r}, with images or without; if it generates text in another way, load it in "
        "Python with its own class and call rope_patch.patch(model, ...). `rope-patch diagnose` "
        "reads its config as it is"
    )


_GENERATING = (AutoModelForCausalLM, AutoModelForImageTextToText)
# Classes besides those that generate text from a text alone.
_OTHERS = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForMaskedLM, AutoModel)


def auto_class(config: Any, *, any_kind: bool = False) -> Any:
    """Return `AutoModelForCausalLM`, or the class of models that read images beside text.

    The latter read text alone, too. A checkpoint with images is read whole even where transformers
    has a class for its text part (Qwen 3.5, Llama 4), so that a saved model keeps its images, and
    an exported rotation lies where the whole config has it.

    Args:
        config: A model's config; None if it is unknown.
        any_kind: Return the class for an encoder, or an encoder with a decoder, where the config's
            `architectures` names such a model.
    """
    kind: Any = type(config)
    own = {auto.__name__: auto for auto in (*_GENERATING, *(_OTHERS if any_kind else ()))}
    if (name := own_auto_class(config, tuple(own))) is not None:
        return own[name]
    if any_kind and (architectures := getattr(config, "architectures", None)):
        for auto in _OTHERS:
            if _class_name(auto, kind) == architectures[0]:
                return auto
    if kind not in image_text_model_classes() or config.is_encoder_decoder:
        return AutoModelForCausalLM
    if kind in (text_models := text_model_classes()):
        classes: Any = text_models[kind]
        first = classes[0] if isinstance(classes, tuple) else classes
        if first.config_class is kind:  # it is the whole model (Gemma 3)
            return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _class_name(auto: Any, kind: Any) -> str | None:
    """Return the name of the class that an auto class chooses for a class of configs."""
    chosen = auto._model_mapping.get(kind, None)
    chosen = chosen[0] if isinstance(chosen, tuple) else chosen
    return None if chosen is None else chosen.__name__


def require_model_folder(path: str | os.PathLike[str], gguf_file: str | None) -> None:
    """Raise if a path looks like a folder but holds no model."""
    folder = Path(path)
    if not folder.exists():
        if folder.suffix == ".gguf":
            raise ValueError(f"no such file: {path}")
        if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1:
            raise ValueError(f"no such folder: {path}")
        return
    if not folder.is_dir():
        raise ValueError(f"{path} is a file: expected a GGUF file, or the folder it is in")
    required = gguf_file or "config.json"
    if not (folder / required).is_file():
        names = sorted(p.name for p in folder.iterdir())[:5]
        raise ValueError(
            f"{path} holds no {required}: expected a model's folder, found "
            f"{', '.join(names) or 'nothing'}"
        )


def require_complete_shards(folder: Path) -> None:
    """Raise if a folder's safetensors are missing or cut short, before anything is read."""
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


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has any file of a tokenizer; True if it is no folder."""
    folder = Path(path)
    return not folder.is_dir() or any(
        "token" in p.name or p.name.startswith(("vocab", "spiece")) or p.suffix == ".model"
        for p in folder.iterdir()
    )
