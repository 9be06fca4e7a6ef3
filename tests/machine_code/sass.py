"""Read NVIDIA's machine code: the path of a warp through a kernel, and how long it takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)(?P<operands>.*?)\s*;"
)
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_LOAD_WIDTH = re.compile(r"\.(64|128)$")

# Cycles of a read from the L2 cache, and instructions of a lone warp in a cycle.
_READ_CYCLES = 280
_INSTRUCTIONS_PER_CYCLE = 0.4


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Such as "LDG.E.128".
        operands: What follows the name.
        is_guarded: Whether a predicate can turn it off.
        target: Index of the instruction that it branches to.
    """

    name: str
    operands: str
    is_guarded: bool
    target: int | None

    def registers(self) -> set[int]:
        """Return the numbers of the registers that the operands name."""
        return {int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)}

    def loaded_registers(self) -> range:
        """Return the registers that a read of global memory fills, none for others."""
        first = re.match(r"\s*R(\d+)\b", self.operands)
        if not self.name.startswith("LDG") or first is None:
            return range(0)
        width = _LOAD_WIDTH.search(self.name)
        return range(int(first[1]), int(first[1]) + (int(width[1]) // 32 if width else 1))


class Sass:
    """Disassembled kernel.

    Attributes:
        instructions: Without NOPs.
        registers: Registers per thread.
        stack: Bytes per thread of local memory, which holds spilled registers.
    """

    def __init__(self, cubin: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            usage, text = (
                subprocess.run(
                    [TOOLS / tool, option, file.name], capture_output=True, text=True, check=True
                ).stdout
                for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
            )
        counts = {name: int(x) for name, x in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
        self.registers, self.stack = counts["REG"], counts["STACK"] + counts["LOCAL"]
        self.instructions = parse_sass(text)

    def names(self) -> dict[str, int]:
        """Return how often each instruction is in the code."""
        return dict(Counter(x.name for x in self.instructions))


def parse_sass(text: str) -> list[Instruction]:
    """Return the instructions of nvdisasm's output, without NOPs."""
    matches: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(matches)
        elif (found := _INSTRUCTION.match(line)) and found["name"] != "NOP":
            matches.append(found)
    instructions = []
    for match in matches:
        # BRA.DIV leads to code for diverged warps, and our warps do not diverge there. Code for
        # sm_80 leaves loops by calls that do not return.
        is_branch = match["name"].startswith(("BRA", "CALL")) and "DIV" not in match["name"]
        label = _TARGET.search(match["operands"]) if is_branch else None
        target = labels[label[1]] if label else None
        is_guarded = bool(match["guard"]) or bool(re.match(r"\s*U?!?U?P\d", match["operands"]))
        instructions.append(Instruction(match["name"], match["operands"], is_guarded, target))
    return instructions


class _Loops:
    """The loops of a kernel, and which trip a warp is in."""

    def __init__(self, instructions: Sequence[Instruction], trips: Sequence[int]) -> None:
        self.ends = {
            x.target: i for i, x in enumerate(instructions) if x.target is not None and x.target < i
        }
        if len(self.ends) != len(trips):
            raise ValueError(f"expected {len(trips)} loops, found {len(self.ends)}")
        # The others are left by their last branch.
        self.open = {start for start, end in self.ends.items() if not instructions[end].is_guarded}
        self.trips = dict(zip(sorted(self.ends), trips, strict=True))
        self.remaining = dict(self.trips)

    def repeats(self, start: int) -> bool:
        """Return whether the last branch of the loop at `start` is taken."""
        self.remaining[start] -= 1
        if self.remaining[start] > 0:
            return True
        if start in self.open:
            raise ValueError(f"the loop from {start} on has no end")
        self.remaining[start] = self.trips[start]
        return False

    def skips(self, index: int, target: int) -> bool:
        """Return whether a branch is taken to skip a loop, or to leave one in its last trip."""
        for start, end in self.ends.items():
            if index < start and end < target and not self.trips[start]:
                return True
            is_inside = start <= index < end < target
            if is_inside and start in self.open and self.remaining[start] == 1:
                self.remaining[start] = self.trips[start]
                return True
        return False


def walk(
    instructions: Sequence[Instruction], trips: Sequence[int], takes_first_branch: bool = False
) -> Iterator[Instruction]:
    """Yield the instructions that a warp executes.

    Args:
        instructions: The kernel.
        trips: How often each loop runs, in the order of the loops in the code. Loops that
            `takes_first_branch` leaves out count, too.
        takes_first_branch: Whether the first forward branch is taken. Others are taken only to skip
            a loop of no trips, or to leave a loop in its last trip.

    Raises:
        ValueError: The code has another number of loops, or a loop without an end.
    """
    loops, may_choose, index = _Loops(instructions, trips), takes_first_branch, 0
    while True:
        x = instructions[index]
        yield x
        if x.name.startswith("EXIT"):
            if not x.is_guarded or loops.skips(index, len(instructions)):
                return
        elif x.target is not None and x.target <= index:
            if loops.repeats(x.target):
                index = x.target
                continue
        elif x.target is not None:
            if not x.is_guarded or may_choose or loops.skips(index, x.target):
                may_choose, index = may_choose and not x.is_guarded, x.target
                continue
            may_choose = False
        index += 1


def estimate_cycles(path: Sequence[Instruction]) -> float:
    """Return the cycles of a lone warp: a steady rate, and waits for reads that are used next."""
    cycle, ready = 0.0, dict[int, float]()
    for x in path:
        cycle = max(cycle, *(ready.get(register, 0.0) for register in x.registers()), 0.0)
        cycle += 1 / _INSTRUCTIONS_PER_CYCLE
        ready.update(dict.fromkeys(x.loaded_registers(), cycle + _READ_CYCLES))
    return cycle
