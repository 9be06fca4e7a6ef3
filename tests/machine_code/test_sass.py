"""Test how many instructions a warp executes, on code that is short enough to count by hand."""

import pytest

pytest.importorskip("triton")

from machine_code.launch_code import count_ptx_accesses
from machine_code.sass import estimate_cycles, parse_sass, walk


def parse(*lines):
    """Parse lines that are labels or instructions; each instruction gets an address."""
    return parse_sass(
        "\n".join(
            line if line.startswith(".L") else f"        /*{16 * i:04x}*/  {line} ;"
            for i, line in enumerate(lines)
        )
    )


def count(instructions, *arguments):
    return len(list(walk(instructions, *arguments)))


NESTED = parse(
    "MOV R0, RZ",
    "@P0 BRA `(.L_x_0)",
    ".L_x_1:",
    "IADD R1, R1, 0x1",
    ".L_x_2:",
    "FMUL R2, R2, R3",
    "NOP",
    "@!P1 BRA `(.L_x_2)",
    "@!P2 BRA `(.L_x_1)",
    "EXIT",
    ".L_x_0:",
    "MOV R4, R5",
    "EXIT",
    ".L_x_3:",
    "BRA `(.L_x_3)",
)


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_nested_loops(outer, inner):
    """Two instructions, then an addition, `inner` of two and a branch, `outer` times; an exit."""
    assert count(NESTED, [outer, inner]) == 2 + outer * (2 + 2 * inner) + 1


def test_first_branch_chooses_the_program():
    assert [x.name for x in walk(NESTED, [5, 5], True)] == ["MOV", "BRA", "MOV", "EXIT"]


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_loop_of_no_trips_is_skipped(trips):
    code = parse(
        "@!P0 BRA `(.L_x_0)",
        ".L_x_1:",
        "FADD R0, R0, R1",
        "@P1 BRA `(.L_x_1)",
        ".L_x_0:",
        "EXIT",
    )
    assert count(code, [trips]) == 2 + 2 * trips


LEAVING = {
    "a call": ["@P2 CALL.REL.NOINC `(.L_x_0)", "BRA `(.L_x_1)", ".L_x_0:", "EXIT"],
    "an exit": ["@P2 EXIT", "BRA `(.L_x_1)"],
}


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize("trips", [1, 3])
def test_loop_that_is_left_before_its_last_branch(trips, way):
    code = parse(".L_x_1:", "FADD R0, R0, R1", *LEAVING[way])
    assert count(code, [trips]) == 3 * trips - 1 + (way == "a call")


def test_unexpected_code_is_an_error():
    with pytest.raises(ValueError, match="expected 1 loops, found 2"):
        list(walk(NESTED, [3]))
    endless = parse(".L_x_1:", "FADD R0, R0, R1", "BRA `(.L_x_1)", "EXIT")
    with pytest.raises(ValueError, match="the loop from 0 on has no end"):
        list(walk(endless, [3]))


def test_waits_overlap_if_reads_start_together():
    """A read takes 280 cycles from its start, and each instruction 2.5."""
    together = parse(
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.64 R8, desc[UR4][R2.64+0x200]",
        "FADD R0, R7, R1",  # the last register of the first read
        "FADD R0, R9, R1",
    )
    in_a_row = [together[i] for i in (0, 2, 1, 3)]
    assert estimate_cycles(together) == pytest.approx(2 * 2.5 + 280 + 2.5)
    assert estimate_cycles(in_a_row) == pytest.approx(2 * (2.5 + 280 + 2.5))
    assert estimate_cycles(together[:2]) == 5


def test_widths_in_ptx():
    ptx = """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.L1::evict_last.b16 { %rs1 }, [ %rd2 + 0 ];
        st.global.v2.b32 [ %rd3 + 0 ], { %r1, %r2 };
        ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
        st.global.v4.b32 [ %rd3 + 0 ], { %r1, %r2, %r3, %r4 };
        st.global.v4.b32 [ %rd3 + 16 ], { %r1, %r2, %r3, %r4 };
    """
    assert count_ptx_accesses(ptx) == {"ld 128": 1, "ld 16": 1, "st 64": 1, "st 128": 2}
