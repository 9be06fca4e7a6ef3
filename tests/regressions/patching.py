"""Defects of patching: rotations, caches, position maps, and encodings put in their place."""

from regressions.defect import Defect

DEFECTS = [
    Defect(
        "a bias of `encode` reaches the choice of sparse attention",
        "rope_patch/patching/architecture/attention_source.py",
        "        elif isinstance(node, ast.Assign) and any(_is_name(name, MASK) for name in node.targets):\n"
        "            given.append(node.value)\n",
        "",
        ("tests/patching/replacement/test_other_decoders.py",),
    ),
]
