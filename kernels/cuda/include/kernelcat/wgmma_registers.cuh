// The registers of a warpgroup matrix instruction as inline assembly names them.
//
// For an accumulator `float (&d)[COUNT]` that comes first among the operands of an asm statement,
// KERNELCAT_REGISTERS_COUNT is the text "%0, %1 ..." and KERNELCAT_OUTPUTS_COUNT the list of output
// operands.
#pragma once

// clang-format off
#define KERNELCAT_REGISTERS_8 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
#define KERNELCAT_REGISTERS_16 \
  KERNELCAT_REGISTERS_8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define KERNELCAT_REGISTERS_24 \
  KERNELCAT_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define KERNELCAT_REGISTERS_32 \
  KERNELCAT_REGISTERS_24 ", " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define KERNELCAT_REGISTERS_40 \
  KERNELCAT_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define KERNELCAT_REGISTERS_48 \
  KERNELCAT_REGISTERS_40 ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define KERNELCAT_REGISTERS_64 \
  KERNELCAT_REGISTERS_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KERNELCAT_REGISTERS_80 \
  KERNELCAT_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KERNELCAT_REGISTERS_96 \
  KERNELCAT_REGISTERS_80 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KERNELCAT_REGISTERS_112 \
  KERNELCAT_REGISTERS_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define KERNELCAT_REGISTERS_128 \
  KERNELCAT_REGISTERS_112 ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define KERNELCAT_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KERNELCAT_D16(i) KERNELCAT_D8(i), KERNELCAT_D8(i + 8)
#define KERNELCAT_D32(i) KERNELCAT_D16(i), KERNELCAT_D16(i + 16)
#define KERNELCAT_D64(i) KERNELCAT_D32(i), KERNELCAT_D32(i + 32)

#define KERNELCAT_OUTPUTS_8 KERNELCAT_D8(0)
#define KERNELCAT_OUTPUTS_16 KERNELCAT_D16(0)
#define KERNELCAT_OUTPUTS_24 KERNELCAT_D16(0), KERNELCAT_D8(16)
#define KERNELCAT_OUTPUTS_32 KERNELCAT_D32(0)
#define KERNELCAT_OUTPUTS_40 KERNELCAT_D32(0), KERNELCAT_D8(32)
#define KERNELCAT_OUTPUTS_48 KERNELCAT_D32(0), KERNELCAT_D16(32)
#define KERNELCAT_OUTPUTS_64 KERNELCAT_D64(0)
#define KERNELCAT_OUTPUTS_80 KERNELCAT_D64(0), KERNELCAT_D16(64)
#define KERNELCAT_OUTPUTS_96 KERNELCAT_D64(0), KERNELCAT_D32(64)
#define KERNELCAT_OUTPUTS_112 KERNELCAT_D64(0), KERNELCAT_D32(64), KERNELCAT_D16(96)
#define KERNELCAT_OUTPUTS_128 KERNELCAT_D64(0), KERNELCAT_D64(64)
// clang-format on
