"""Test the width of the copy kernel's accesses, in code compiled for an H200 without a GPU."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from rope_patch.benchmarks.kernels import copy_kernel

signature = {"source": "*i32", "target": "*i32", "words": "i32", "BLOCK": "constexpr"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
source = ASTSource(copy_kernel.copy_words, signature, {(3,): copy_kernel.BLOCK}, aligned)
target, options = GPUTarget("cuda", 90, 32), {"num_warps": copy_kernel.WARPS}
code = triton.compile(source, target=target, options=options).asm["ptx"]
print(*sorted(set(re.findall(r"(?:ld|st)\\.global\\S*", code))))
"""


def test_copy_kernel_accesses_16_bytes_at_a_time():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["ld.global.v4.b32", "st.global.v4.b32"]
