// kernels/cuda/include/kernelcat/fp4_operand.cuh on the host: its own source but for the
// instructions that copy one half of a register to the other.
#pragma once

#include <kernelcat/fp4.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/widen.cuh>

#define asm(...) result = (pair >> kHalf * 16 & 0xffff) * 0x10001
#include_next <kernelcat/fp4_operand.cuh>
#undef asm
