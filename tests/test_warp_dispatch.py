"""The analysis of machine code that finds reads ordered after writes by a barrier."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.jit.cache import build
from kernelcat.runtime import gpu
from kernelcat.verify.inspect import disassemble
from kernelcat.verify.warp_roles import ordered

SASS = """\
.L_x_1:
        /*0090*/                   USETMAXREG.DEALLOC.CTAPOOL 0x50 ;
        /*00d0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00e0*/                   ULEA UR9, UR4, UR9, 0x18 ;
        /*0100*/                   LDS.U8 R2, [R2+UR15+0x340cc] ;
        /*0120*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0130*/               @P0 BRA `(.L_x_1) ;
        /*41e0*/                   STS.64 [UR9+0x340d0], R2 ;
        /*41f0*/                   STS [UR9+0x340d8], R4 ;
.L_x_2:
        /*4200*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*4210*/                   EXIT ;
"""
BOTH = {(0x41E0, 0x100), (0x41F0, 0x100)}


def test_a_barrier_of_the_thread_block_orders_earlier_writes_before_later_reads() -> None:
    assert ordered(SASS) == BOTH


@pytest.mark.parametrize(
    ("old", "new", "remaining"),
    [
        ("/*00d0*/                   BAR", "/*00d0*/              @P1 BAR", set()),
        ("/*00e0*/                   ULEA", ".L_x_3:\n /*00e0*/ ULEA", set()),
        ("/*00e0*/                   ULEA UR9, UR4, UR9, 0x18", "/*00e0*/ BRA `(.L_x_2)", set()),
        ("/*4200*/                   BAR.SYNC.DEFER_BLOCKING 0x1",
         "/*4200*/ BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", set()),
        ("/*4200*/                   BAR.SYNC.DEFER_BLOCKING 0x1",
         "/*4200*/ BAR.SYNC.DEFER_BLOCKING 0x2", set()),
        ("/*41f0*/                   STS", "/*41e8*/ @P0 BRA `(.L_x_1) ;\n /*41f0*/ STS",
         {(0x41F0, 0x100)}),
        ("0x340d8", "0x34120", {(0x41E0, 0x100)}),
        ("0x340cc", "0x340d8", set()),
    ],
)  # fmt: skip
def test_a_read_is_ordered_only_with_a_barrier_on_every_path(
    old: str, new: str, remaining: set[tuple[int, int]]
) -> None:
    assert old in SASS
    assert ordered(SASS.replace(old, new)) == remaining


def test_the_warp_role_table_of_triton_is_recognized() -> None:
    """The entry and the exit of ``warp_specialize`` write the table; one instruction reads it."""
    target = gpu.find("h200")
    problem = catalog.entry("multicast_gemm").problem(M=64, N=96, K=64, dtype="bfloat16")
    implementation = catalog.implementation("multicast_gemm", "triton", "unicast")
    [step] = implementation.program(problem, implementation.default(problem, target), target).steps
    pairs = ordered(disassemble(build(step.source, "sm_90a").cubin))
    assert len(pairs) >= 2 and len({pair.read for pair in pairs}) == 1
