"""Test what the package leans on in transformers: asked in one folder, by kind, or refused."""

import ast
import pkgutil
from pathlib import Path
from typing import Optional

import pytest
import torch
import transformers
from helpers.tiny_models import FACTOR, make_model, tokens
from torch import nn
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    Trainer,
    TrainerCallback,
)
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

import rope_patch
from rope_patch import RopePatchCallback
from rope_patch.training import LongContextTrainer
from rope_patch.transformers_api import (
    ForwardCall,
    cache_among,
    cache_arguments,
    cache_in_output,
    cache_parameter,
    is_cache,
    is_paged,
    require_overridable,
    served_folder,
)

RELEASE = f"transformers {transformers.__version__}"
NEW = "cache" in BaseModelOutputWithPast.__dataclass_fields__


# -- names of transformers stand in one folder -----------------------------------------------------

PACKAGE = Path(rope_patch.__file__).parent
ROOM = PACKAGE / "transformers_api"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ROOM not in path.parents]
# Beside names of transformers' top level: its loggers, which it documents as public.
PUBLIC = {("transformers.utils", "logging")}
SUBMODULES = {info.name for info in pkgutil.iter_modules(transformers.__path__)}
# What is spelled there alone.
NAMES = (
    *("past_key_values", "ROPE_INIT_FUNCTIONS", "ALL_ATTENTION_FUNCTIONS", "_attn_implementation"),
    *("_get_candidate_generator", "init_continuous_batching", "_prepare_cache_for_generation"),
    "_update_model_kwargs_for_generation",
)


def private_imports(tree):
    """Yield the imports of transformers' submodules, as they are written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            yield from (
                ast.unparse(node) for a in node.names if (node.module, a.name) not in PUBLIC
            )
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("transformers."):
                    yield ast.unparse(node)
        if (
            isinstance(node, ast.Attribute)
            and getattr(node.value, "id", None) == "transformers"
            and node.attr in SUBMODULES
        ):
            yield ast.unparse(node)


def names_used(tree):
    """Return the names, attributes and strings of code, docstrings left out."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ):
            yield node.value


def test_only_the_room_leans_on_internals():
    offences = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in ("transformers.", *NAMES)):
            continue
        tree = ast.parse(text)
        if uses := [*private_imports(tree), *set(names_used(tree)) & set(NAMES)]:
            offences[str(path.relative_to(PACKAGE))] = uses
    assert not offences


def test_the_search_sees_what_it_looks_for():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOM.glob("*.py")]
    assert any(list(private_imports(tree)) for tree in trees)
    assert set(NAMES) <= {name for tree in trees for name in names_used(tree)}


# -- arguments and caches are known by their kind --------------------------------------------------


class Annotated(nn.Module):
    def forward(self, input_ids, memory: Cache | None = None, **kwargs): ...


class Optionally(nn.Module):
    def forward(self, input_ids, memory: Optional[DynamicCache] = None): ...  # noqa: UP045


class Spelled(nn.Module):
    def forward(self, input_ids, memory: "DynamicCache | None" = None): ...


class Named(nn.Module):
    def forward(self, input_ids, past_key_values=None, use_cache=None): ...


class Without(nn.Module):
    def forward(self, input_ids, use_cache: bool = False): ...


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((kind, "memory") for kind in (Annotated, Optionally, Spelled)),
        (Named, "past_key_values"),
        (Without, None),
    ],
)
def test_parameters_are_known_by_their_annotation_before_their_name(module, name):
    assert cache_parameter(module()) == name
    if name is None:
        with pytest.raises(ValueError, match=RELEASE):
            cache_arguments(module(), DynamicCache())
    else:
        cache = DynamicCache()
        assert cache_arguments(nn.Sequential(module()), cache) == {name: cache}
    assert cache_arguments(module(), None) == {}


@pytest.mark.parametrize("name", ["cache", "past_key_values", "memory"])
def test_values_are_known_by_their_kind(name):
    cache = DynamicCache()
    ids = tokens(3)
    others = {"input_ids": ids, "attention_mask": None, "use_cache": True}
    assert cache_among({**others, name: cache}) is cache
    assert cache_among({**others, "past_key_values": None, name: cache}) is cache
    both = EncoderDecoderCache(cache, DynamicCache())
    assert cache_among({**others, name: both}) is cache
    assert cache_among(others) is None


def test_arguments_by_position():
    cache = DynamicCache()
    call = ForwardCall(Annotated(), (tokens(3), cache), {"position_ids": None})
    assert call.cache is cache
    assert call.tokens.shape == (1, 3)


def test_a_cache_that_the_forward_would_ignore_is_refused():
    call = ForwardCall(Annotated(), (tokens(3),), {"past_key_values": DynamicCache()})
    with pytest.raises(ValueError, match=r"memory.*past_key_values"):
        _ = call.cache
    paged = PagedAttentionCache.__new__(PagedAttentionCache)
    assert ForwardCall(Annotated(), (), {"cache": paged}).cache is paged


@pytest.mark.parametrize("as_tuple", [False, True])
def test_outputs_are_searched_for_a_cache(as_tuple):
    cache, hidden = DynamicCache(), torch.zeros(1, 2, 3)
    name = "cache" if NEW else "past_key_values"
    output = BaseModelOutputWithPast(last_hidden_state=hidden, **{name: cache})
    assert cache_in_output(output.to_tuple() if as_tuple else output) is cache
    assert cache_in_output((hidden,) if as_tuple else ModelOutput(logits=hidden)) is None


def test_paged_caches_are_known_by_their_class():
    paged = PagedAttentionCache.__new__(PagedAttentionCache)
    assert is_paged(paged)
    assert is_cache(paged)
    assert not is_paged(DynamicCache())


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "self-extend"])
@pytest.mark.parametrize("name", ["past_key_values", *(["cache"] if NEW else [])])
def test_both_spellings_of_users(name, method):
    model = make_model()
    rope_patch.patch(model, method, **({} if method == "self-extend" else {"factor": 4}))
    ids, cache = tokens(150), DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, **{name: cache}).logits for part in ids.split([149, 1], 1)]
        expected = model(ids).logits
    torch.testing.assert_close(parts[1], expected[:, -1:], rtol=0, atol=1e-4)


# -- steps of generate, of which a release may lack one --------------------------------------------


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("_get_candidate_generator", {}),
        ("_prepare_cache_for_generation", {"growth": "admission"}),
        ("_prepare_generated_length", {"growth": "admission"}),
    ],
)
def test_a_missing_step_is_refused(monkeypatch, step, options):
    monkeypatch.delattr(GenerationMixin, step)
    model = make_model()
    with pytest.raises(ValueError, match=f"{step} in {RELEASE}"):
        rope_patch.patch(model, "dynamic-yarn", factor=FACTOR, **options)
    assert rope_patch.current(model) is None
    rope_patch.patch(model, "yarn", factor=FACTOR)  # needs none of them


@pytest.mark.parametrize(
    "step", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"]
)
def test_steps_that_only_save_time_may_be_missing(monkeypatch, step):
    monkeypatch.delattr(GenerationMixin, step)
    rope_patch.patch(make_model(), "dynamic-yarn", factor=FACTOR)


def test_another_start_of_continuous_batching_is_refused(monkeypatch):
    step = "init_continuous_batching"
    owner = next(c for c in GenerationMixin.__mro__ if step in vars(c))
    monkeypatch.delattr(owner, step)
    model = make_model()
    with pytest.raises(ValueError, match=RELEASE):
        rope_patch.patch(model, "yarn", factor=FACTOR)
    assert rope_patch.current(model) is None


@pytest.mark.parametrize("name", ["folder", "fold@er"])
def test_folders_are_known_with_and_without_a_revision(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    assert served_folder(str(folder)) == folder
    assert served_folder(f"{folder}@main") == folder
    assert str(served_folder("org/model@main")) == "org/model"


# -- the Trainer -----------------------------------------------------------------------------------


def overridden(subclass, base):
    names = {name for name in vars(subclass) if name in dir(base) and not name.startswith("__")}
    return [(base, name) for name in sorted(names)]


def test_every_override_that_nobody_calls_is_refused(monkeypatch):
    """An override of a method that a release no longer calls would do nothing, in silence."""
    hooks = next(c for c in TrainerCallback.__subclasses__() if c.__name__ == "_TrainerHooks")
    for make, names in (
        (RopePatchCallback, overridden(RopePatchCallback, TrainerCallback)),
        (lambda: LongContextTrainer(None, None, None), overridden(LongContextTrainer, Trainer)),
        (lambda: LongContextTrainer(None, None, None), overridden(hooks, TrainerCallback)),
    ):
        assert names
        for base, name in names:
            with monkeypatch.context() as release:
                release.delattr(base, name)
                with pytest.raises(ValueError, match=f"{name}.* overrides"):
                    make()
    require_overridable(TrainerCallback, RopePatchCallback, "on_save")
