"""Read facts about a model's attentions from the source code of their forwards.

Most architectures of transformers rotate by one call of `apply_rotary_pos_emb` with the cos and sin
that they receive. If a forward uses them nowhere else, other tensors can take their place. Which
layers rotate at all is read from the config, and from conditions ahead of that call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from rope_patch.patching.architecture.rotary_modules import CANNOT_FOLLOW_YET
from rope_patch.rope_config import by_layer_type
from rope_patch.transformers_api.forwards import MASK
from rope_patch.transformers_api.models import APPLY_ROTATION
from rope_patch.utils.errors import Refused

_ANGLES = ("cos", "sin")

# How a cache is updated, in the form of `ast.unparse`.
_UPDATE = re.compile(
    r"if (?P<cache>\w+) is not None:\n"
    r" +(?P<k>\w+), (?P<v>\w+) = "
    r"(?P=cache)\.update\((?P=k), (?P=v), self\.layer_idx(, kwargs=kwargs)?\)"
)

# Calls that change a tensor's shape, but none of its numbers.
_SHAPING = {"view", "reshape", "transpose", "contiguous", "unflatten"}


@dataclass(frozen=True)
class ForwardUsage:
    """Facts about how a module's forward uses cos and sin.

    Attributes:
        rotates: Whether it calls `apply_rotary_pos_emb`.
        one_tensor: Whether the call rotates one tensor, not queries and keys together.
        problem: Why nothing else can take the place of cos and sin, or None.
        norm_names: Attributes of the norms whose results always go straight into the rotation,
            for queries and keys. The forward uses them nowhere else.
        cache_name: The parameter with the cache, if its update follows the rotation at once and is
            all that the forward does with it: nothing reads queries or keys in between.
    """

    rotates: bool
    one_tensor: bool = False
    problem: str | None = None
    norm_names: tuple[str, str] | None = None
    cache_name: str | None = None


def inspect_forward(module_class: Any) -> ForwardUsage:
    """Return the facts in the source of a module class's forward, parsed once for each class."""
    return _parse_forward(module_class)


@functools.cache
def _parse_forward(module_class: Any) -> ForwardUsage:
    try:
        function = undecorated_forward(module_class)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, AttributeError, SyntaxError):
        return ForwardUsage(rotates=False)
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_name(n.func, APPLY_ROTATION)
    ]
    used = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Name) and n.id in _ANGLES and isinstance(n.ctx, ast.Load)
    ]
    # Older transformers pass cos and sin to caches, which do not use them.
    cached = [n for d in ast.walk(tree) if isinstance(d, ast.Dict) for n in d.values if n in used]
    if not calls:
        problem = f"{module_class.__name__} uses cos and sin in a way of its own" if used else None
        return ForwardUsage(rotates=False, problem=problem)
    single = rotates_one_tensor(function.__globals__.get(APPLY_ROTATION))
    count = 1 if single else 2
    tidy = single is not None and all(
        [_is_name(a, name) for a, name in zip(call.args[count:], _ANGLES, strict=False)]
        == [True, True]
        and len(call.args) == count + 2
        and {k.arg for k in call.keywords} <= {"unsqueeze_dim"}
        for call in calls
    )
    if not tidy or len(used) - len(cached) != 2 * len(calls):
        return ForwardUsage(
            rotates=True, problem=f"{module_class.__name__} uses cos and sin in a way of its own"
        )
    norms = cache_name = None
    if len(calls) == 1 and not single:
        body = tree.body[0].body  # type: ignore[attr-defined]
        q_norm, k_norm = (_norm_before(body, calls[0], a) for a in calls[0].args[:2])
        uses = [n for n in ast.walk(tree) if getattr(n, "attr", None) in (q_norm, k_norm)]
        if q_norm and k_norm and len(uses) == 2:
            norms = (q_norm, k_norm)
        cache_name = _cache_after(tree.body[0], calls[0])
    return ForwardUsage(True, bool(single), norm_names=norms, cache_name=cache_name)


def undecorated_forward(module_class: Any) -> Any:
    """Return a module class's forward without its decorators."""
    return inspect.unwrap(module_class.forward)


def hands_mask_on(module_class: Any) -> bool:
    """Return whether an attention's forward hands its mask, as it is, to its attention function.

    What the attention function gets may be cut to the keys. Doge makes a mask of its own from it,
    Zaya finds it in a dictionary, and sparse attention (DeepSeek-V3.2) chooses keys by it first.
    """
    try:
        source = inspect.getsource(undecorated_forward(module_class))
    except (OSError, TypeError, AttributeError):
        return False
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    given: list[ast.expr] = []
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        # function(self, query, key, value, attention_mask, ...)
        if len(call.args) >= 4 and _is_name(call.args[0], "self"):
            named = [each.value for each in call.keywords if each.arg == MASK]
            given += named or call.args[4:5]
        elif ast.unparse(call.func).startswith("self.") and _mentions(call, MASK):
            return False  # self.indexer(..., attention_mask, ...)
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _assigns(node, MASK)]
    changes = [node for node in nodes if _is_name(node, MASK) and isinstance(node.ctx, ast.Store)]
    if len(changes) > len(assigned):  # another statement changes it, such as +=
        return False
    given += [node.value for node in assigned]
    return bool(given) and all(
        _is_name(mask.value if isinstance(mask, ast.Subscript) else mask, MASK) for mask in given
    )


def rotates_one_tensor(function: Any) -> bool | None:
    """Return whether an `apply_rotary_pos_emb` takes one tensor, not two; None if neither."""
    function = getattr(function, "forward", function)  # a module where `kernels` is installed
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if names[:4] == ["q", "k", *_ANGLES]:
        return False
    return True if names[:3] == ["x", *_ANGLES] else None


def _rebinds(node: ast.AST, call: ast.Call) -> bool:
    """Return whether a node assigns a call's two results to the names of its first arguments."""
    if not isinstance(node, ast.Assign) or node.value is not call or len(node.targets) != 1:
        return False
    target = node.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) else []
    names = [argument.id for argument in call.args[:2] if isinstance(argument, ast.Name)]
    return len(names) == 2 and [getattr(t, "id", None) for t in targets] == names


def _cache_after(function: Any, call: ast.Call) -> str | None:
    """Return the parameter whose only use is `update` in the statement after a call, or None."""
    # The two statements must be these, whatever the five names are:
    #
    #     q, k = apply_rotary_pos_emb(q, k, cos, sin)
    #     if cache is not None:
    #         k, v = cache.update(k, v, self.layer_idx)
    #
    # From transformers 5.24 on, `kwargs=kwargs` follows, for paged caches.
    rotations = [i for i, statement in enumerate(function.body) if _rebinds(statement, call)]
    if not rotations or rotations[0] + 1 == len(function.body):
        return None
    q, k = (argument.id for argument in call.args[:2])  # type: ignore[attr-defined]
    written = _UPDATE.fullmatch(ast.unparse(function.body[rotations[0] + 1]))
    if written is None or written["k"] != k or len({q, k, written["v"], written["cache"]}) != 4:
        return None
    cache = written["cache"]
    parameters = [x.arg for x in (*function.args.args, *function.args.kwonlyargs)]
    uses = [node for node in ast.walk(function) if _is_name(node, cache)]
    return cache if cache in parameters and len(uses) == 2 else None


def _norm_before(body: list[ast.stmt], call: ast.Call, argument: ast.expr) -> str | None:
    """Return the attribute of self whose result reaches the call as `argument`, or None."""
    if not isinstance(argument, ast.Name):
        return None
    name, norm = argument.id, None
    for statement in body:
        if any(node is call for node in ast.walk(statement)):
            # Under a condition, a layer without rotation would get no norms either (EXAONE 4).
            return norm if isinstance(statement, ast.Assign) and statement.value is call else None
        loads = any(_is_name(n, name) for n in ast.walk(statement))
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and _is_name(statement.targets[0], name)
        ):
            norm = None if loads else norm  # read elsewhere, or assigned under a condition
            continue
        value: ast.expr = statement.value
        while (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in _SHAPING
        ):
            value = value.func.value
        if _is_name(value, name):
            continue
        method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
        on_self = method and _is_name(value.func.value, "self")  # type: ignore[attr-defined]
        norm = value.func.attr if on_self else None  # type: ignore[attr-defined]
    return None


def _is_name(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name


def _mentions(node: ast.AST, name: str) -> bool:
    return any(_is_name(each, name) for each in ast.walk(node))


def _assigns(node: ast.Assign, name: str) -> bool:
    return len(node.targets) == 1 and _is_name(node.targets[0], name)


# Layers that share another layer's keys cache none themselves.
_IGNORED_CONDITIONS = {"self.is_kv_shared_layer"}

# Architectures that test `position_embeddings is not None`, which always holds.
_ALWAYS_ROTATE = ("falcon", "granitemoehybrid", "olmo_hybrid")


def rotated_layer_types(decoder: nn.Module, config: Any) -> list[str | None]:
    """Return the layer type of each layer of the cache that holds rotated keys, "" for the others.

    Those are the decoder's layers; where some run several times and cache each time (Dory's loops),
    their repetitions follow.

    Args:
        decoder: The module that holds the layers.
        config: The model's text config.

    Raises:
        ValueError: Only some layers rotate, and it is unknown which.
    """
    rope_parameters = by_layer_type(config.rope_parameters)
    layer_types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    types = [
        (None if None in rope_parameters else layer_types[index]) if rotates else ""
        for index, rotates in enumerate(_layers_that_rotate(decoder, config, layer_types))
    ]
    if getattr(config, "recurrent_kv_cache_mode", None) == "per_loop":
        first, count = config.n_input_layers, config.n_recurrent_layers
        types += types[first : first + count] * (config.n_recurrent_loops - 1)
    return types


def _layers_that_rotate(
    decoder: nn.Module, config: Any, layer_types: list[str | None]
) -> list[bool]:
    if getattr(config, "no_rope_layers", None):  # SmolLM3, Llama 4: 1 where a layer rotates
        return [bool(rotates) for rotates in config.no_rope_layers]
    if thetas := getattr(config, "layer_rope_theta", None):  # Granite SWA: 0 where none rotates
        return [bool(theta) for theta in thetas]
    rope_parameters = by_layer_type(config.rope_parameters)
    if None not in rope_parameters and None in config.rope_parameters.values():
        return [layer_type in rope_parameters for layer_type in layer_types]  # BEAM
    if config.model_type in ("cohere2", "exaone4", "exaone_moe"):  # only windows rotate
        sliding = [layer_type == "sliding_attention" for layer_type in layer_types]
        whole = config.model_type != "cohere2" and getattr(config, "sliding_window", None) is None
        return [whole or window for window in sliding]
    # Keys of images have no positions (Mllama).
    cross_layers = getattr(config, "cross_attention_layers", None) or ()
    rotates = [index not in cross_layers for index in range(len(layer_types))]
    if config.model_type in _ALWAYS_ROTATE:
        return rotates
    for module in decoder.modules():
        module_class: Any = type(module)
        for condition, expected in _rotation_conditions(module_class):
            if condition in _IGNORED_CONDITIONS:
                continue
            value, layer = (
                _evaluate_condition(module, condition),
                getattr(module, "layer_idx", None),
            )
            if value is None or not isinstance(layer, int):
                raise Refused(
                    f"{type(module).__name__} rotates only if {condition}: layers that do not "
                    f"rotate {CANNOT_FOLLOW_YET}"
                )
            # An attention that serves several layers has the index -1 (Zamba 2).
            for index in [layer] if layer >= 0 else range(len(rotates)):
                rotates[index] &= value is expected
    return rotates


def _evaluate_condition(module: nn.Module, condition: str) -> bool | None:
    """Return a condition's value if it depends on the module alone, else None."""
    names = {n.id for n in ast.walk(ast.parse(condition)) if isinstance(n, ast.Name)}
    if names != {"self"}:
        return None
    try:
        return bool(eval(condition, {"__builtins__": {}}, {"self": module}))
    except (AttributeError, TypeError):
        return None


@functools.cache
def _rotation_conditions(module_class: Any) -> frozenset[tuple[str, bool]]:
    """Return the conditions in a class's forward, each with the value for which it rotates."""
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(module_class.forward)))
    except (OSError, TypeError, AttributeError, SyntaxError):
        return frozenset()
    return frozenset(
        (ast.unparse(choice.test), expected)
        for choice in ast.walk(forward)
        if isinstance(choice, ast.If)
        for expected, branch in ((True, choice.body), (False, choice.orelse))
        for part in branch
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == APPLY_ROTATION
    )
