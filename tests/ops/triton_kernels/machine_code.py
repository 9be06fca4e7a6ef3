"""Cross-compile the kernels for GPUs and count their machine instructions.

Runs as a script, because Triton must not be interpreting. Prints JSON: a `Code` for each of `JOBS`
on an H200, and the names of Triton's outputs for each of `OTHER_JOBS` on an MI300.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rope_patch.ops.kernels import qk_norm_rope, rope, weight_gradient_sum

H200 = GPUTarget("cuda", 90, 32)
MI300 = GPUTarget("hip", "gfx942", 64)

TYPES = {
    **{torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"},
    **{torch.int32: "*i32", torch.int64: "*i64"},
}


@dataclass
class Code:
    """Machine code of a kernel.

    Attributes:
        registers: Registers per thread.
        stack: Bytes per thread of local memory, which holds spilled registers.
        shared: Bytes of shared memory per program.
        instructions: Number of memory instructions by SASS name.
        accesses: Number of accesses by kind and width in PTX, such as "ld v4.b32".
        constants: Constants that the kernel was compiled for.
        warps: Warps per program.
    """

    registers: int = 0
    stack: int = 0
    shared: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    accesses: dict[str, int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    warps: int = 1


class LaunchRecorder:
    """A stand-in for a launcher that records a launch."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, key, tensors, address_bits, make_spec, *spec_args):
        self.tensors, self.spec = tensors, make_spec(*spec_args)


def compile_launch(recorder, target):
    """Compile the kernel as Triton would for the recorded launch, with aligned tensors."""
    kernel, spec = recorder.kernel, recorder.spec
    signature, constants, attributes = {}, {}, {}
    args = (*recorder.tensors, *spec.scalars, *spec.constexprs.values())
    for index, (name, x) in enumerate(zip(kernel.arg_names, args, strict=True)):
        plain = name in (kernel.do_not_specialize or ())
        unaligned = name in (kernel.do_not_specialize_on_alignment or ())
        if name in spec.constexprs or (not plain and isinstance(x, int) and x == 1):
            signature[name], constants[index,] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = TYPES[x.dtype]
            if not unaligned:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(x) < 2**31 else "i64"
            if not plain and x % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": spec.warps, "num_stages": 1})


def count_instructions(compiled, spec):
    """Count instructions with the tools that come with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run(
                [tools / tool, *options, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, *options in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    names = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?((?:LD|ST|RED|ATOM|BAR)[A-Z0-9_.]*)", sass, re.M
    )
    widths = re.findall(
        r"\b(ld|st)\.global(?:\.[a-z]\w*(?:::\w+)*)*?((?:\.v\d)?\.[bfsu]\d+)\b", compiled.asm["ptx"]
    )
    usage_counts = {name: int(x) for name, x in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Code(
        usage_counts["REG"],
        usage_counts["STACK"] + usage_counts["LOCAL"],
        compiled.metadata.shared,
        dict(Counter(names)),
        dict(Counter(f"{kind} {width[1:]}" for kind, width in widths)),
        spec.constexprs,
        spec.warps,
    )


def heads(count, head_dim, dtype=torch.bfloat16):
    """Return heads of 8k tokens in the memory layout of projections."""
    return torch.empty(1, 8192, count, head_dim, dtype=dtype, device="meta").transpose(1, 2)


def record_launch(
    kernel, head_dim, rotary_dim=None, interleaved=False, across=False, counts=(32, 8)
):
    """Record one launch of a kernel by its name, for bfloat16."""
    rotary_dim = rotary_dim or head_dim
    q, k = (heads(n, head_dim) for n in counts)
    shapes = [(n, head_dim) if across else (head_dim,) for n in counts]
    weights = [torch.empty(s, dtype=q.dtype, device="meta") for s in shapes]
    positions = torch.empty(1, 8192, dtype=torch.int64, device="meta")
    packed_freqs = torch.empty(rotary_dim // 2 + 1, dtype=torch.int64, device="meta")
    where = (positions, packed_freqs, None)
    module, attribute = {
        "rope": (rope, "_launcher"),
        "rope backwards": (rope, "_launcher"),
        "re-rotation": (rope, "_launcher"),
        "norm": (qk_norm_rope, "_forward_launcher"),
        "sum of weights": (weight_gradient_sum, "_launcher"),
    }.get(kernel, (qk_norm_rope, "_backward_launcher"))
    launchers = {
        (owner, name): getattr(owner, name)
        for owner in (rope, qk_norm_rope, weight_gradient_sum)
        for name in vars(owner)
        if name.endswith("_launcher")
    }
    for (owner, name), launcher in launchers.items():
        setattr(owner, name, LaunchRecorder(launcher.kernel))
    recorder = getattr(module, attribute)
    if kernel == "re-rotation":
        rope.launch(k, None, *where, interleaved, 1, False, True, True)
    elif module is rope:
        rope.launch(q, k, *where, interleaved, 1, kernel == "rope backwards")
    elif kernel == "norm":
        qk_norm_rope.launch_forward(q, k, *weights, *where, 1e-6, 0.0, interleaved, 1, True)
    else:
        rows = [(1, 8192) if across else (1, 8192, n) for n in counts]
        rstds = [torch.empty(row, dtype=torch.float32, device="meta") for row in rows]
        rest = (*rstds, q, k, *where, 0.0, interleaved, 1, kernel.endswith("by output"))
        qk_norm_rope.launch_backward(q, k, *weights, *rest, not kernel.endswith("frozen"))
    for (owner, name), launcher in launchers.items():
        setattr(owner, name, launcher)
    return recorder


KERNELS = (
    "rope",
    "rope backwards",
    "norm",
    "norm backwards",
    "norm backwards by output",
    "norm backwards, frozen",
)

JOBS = {
    **{
        f"{kernel}, {head_dim}, {'neighbours' if interleaved else 'halves'}": {
            "kernel": kernel,
            "head_dim": head_dim,
            "interleaved": interleaved,
        }
        for kernel in KERNELS
        for head_dim in (64, 128, 256)
        for interleaved in (False, True)
        if kernel != "rope backwards" or head_dim == 128  # differs from the forward pass by a sign
    },
    "norm, together": {"kernel": "norm", "head_dim": 128, "across": True},
    "norm backwards, together": {"kernel": "norm backwards", "head_dim": 128, "across": True},
    "re-rotation": {"kernel": "re-rotation", "head_dim": 128},
    "rope, a part": {"kernel": "rope", "head_dim": 128, "rotary_dim": 32},
}


SUM_JOBS = {
    "weights of a head": {"kernel": "sum of weights", "head_dim": 128},
    "weights of all heads": {"kernel": "sum of weights", "head_dim": 128, "across": True},
}

OTHER_JOBS = {
    kernel: {"kernel": kernel, "head_dim": 128} for kernel in (*KERNELS, "sum of weights")
}


def main():
    codes = {}
    for name, job in (JOBS | SUM_JOBS).items():
        recorder = record_launch(**job)
        codes[name] = asdict(count_instructions(compile_launch(recorder, H200), recorder.spec))
    others = {
        name: sorted(compile_launch(record_launch(**job), MI300).asm)
        for name, job in OTHER_JOBS.items()
    }
    print(json.dumps({"H200": codes, "MI300": others}))


if __name__ == "__main__":
    main()
