"""Test variants: the rotations by which static and dynamic methods are measured."""

import pytest
from helpers.plugins import write_method
from helpers.search_fixtures import TRAINED, questions

import rope_patch
from rope_patch.methods import build, load_plugin
from rope_patch.recommending import (
    UNPATCHED,
    export_command,
    patch_call,
    rotation_key,
    standard_variants,
)
from rope_patch.searching import Fitness

MAPS = ("self-extend", "jet-long", "rerope")


def make_space(model, length):
    request = rope_patch.Extension("longrope", length=length)
    return Fitness(model, questions(count=1), request).space


@pytest.mark.parametrize("length", [512, 768, 1357])
def test_dynamic_variants_rotate_like_the_patched_model(model, length):
    """They equal it at the target length, and the plain model within the trained length."""
    space = make_space(model, length)
    entries = [v for v in standard_variants(space) if v.name not in MAPS]
    for entry in entries:
        if entry.method is None:
            assert (entry.long_rotation, entry.short_rotation) == (UNPATCHED, UNPATCHED)
            continue
        with rope_patch.patch(model, entry.method, length=space.length) as handle:
            (long,) = handle.frequencies_at(space.length).values()
            (short,) = handle.frequencies_at(TRAINED).values()
            (plain,) = handle.original_frequencies.values()
        assert _frequencies(entry.long_rotation, space).close_to(long), entry.name
        expected = plain if entry.dynamic else long
        assert short.close_to(expected), entry.name
        assert (entry.short_rotation == UNPATCHED) == entry.dynamic
    dynamic_keys = [entry.long_rotation.key for entry in entries if entry.dynamic]
    static_keys = [entry.long_rotation.key for entry in entries if not entry.dynamic]
    assert (
        set(dynamic_keys) <= set(static_keys)
        if length == 512
        else not set(dynamic_keys) & set(static_keys)
    )


def test_maps_are_kept_apart_though_their_frequencies_are_the_plain_models(model):
    space = make_space(model, 768)
    maps = [v for v in standard_variants(space) if v.name in MAPS]
    keys = {rotation_key(space, entry.long_rotation) for entry in maps}
    assert len(keys) == 3
    for entry in maps:
        assert entry.short_rotation == UNPATCHED
        call = patch_call(entry, rope_patch.Extension("longrope", length=768), None)
        assert call == f"rope_patch.patch(model, '{entry.name}', length=768)"


def _frequencies(rotation, space):
    method = build(rotation.candidate.method, factor=rotation.factor, **rotation.candidate.options)
    return method.frequencies(space.geometry)


@pytest.mark.usefixtures("own_registry")
def test_static_methods_from_outside_are_variants_keyed_by_their_numbers(model, tmp_path):
    space = make_space(model, 512)

    def outside(**changes):
        load_plugin(str(write_method(tmp_path / "mine.py", **changes)))
        return [each for each in standard_variants(space) if each.method == "outside"]

    (first,), (again,), (changed,) = outside(), outside(), outside(divisor="9")
    assert first.long_rotation.key == again.long_rotation.key != changed.long_rotation.key
    assert first.short_rotation == first.long_rotation
    command = export_command(first, rope_patch.Extension("linear", length=512), "m", ("vllm",))
    assert command.endswith(f"--method outside --length 512 --plugin {tmp_path / 'mine.py'}")
    assert outside(following=True) == []
