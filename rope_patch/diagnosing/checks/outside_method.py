"""Check whether a method that is not ours takes part, and name where it comes from."""

from __future__ import annotations

from collections.abc import Iterator

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts
from rope_patch.methods import Method
from rope_patch.patching.method_wrappers import method_origin
from rope_patch.pretrained.recorded_rotation import describe_outside, is_missing


def outside_method_findings(facts: Facts, method: Method | None) -> Iterator[Finding]:
    """Yield a note for each method from outside: of the model's patch, its folder, the request.

    Args:
        facts: The model.
        method: The method to diagnose, or None.
    """
    handle, sidecar = facts.subject.handle, facts.subject.sidecar
    patched = None if handle is None else handle.method
    for whose, each in (("the model's patch", patched), ("the request", method)):
        origin = None if each is None else method_origin(each)
        if each is not None and origin is not None:
            yield Finding(
                "note",
                "method-from-outside",
                f"{whose} has the method {each.name!r}, which is not rope_patch's",
                f"it is of {origin}",
            )
    if sidecar is not None and (origin_text := describe_outside(sidecar)):
        missing = is_missing(sidecar)
        yield Finding(
            "note",
            "method-from-outside",
            f"the folder was saved with the method {sidecar['method']!r}, which is not rope_patch's"
            + (" and not loaded here" if missing else ""),
            f"rope_patch.json says that it was of {origin_text}",
            "load its plugin to use the method itself; without, rope_patch.load takes the recorded "
            "frequencies"
            if missing
            else "",
        )
