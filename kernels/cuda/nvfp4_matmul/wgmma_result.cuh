// The wgmma kernel's results: sums of D^T become rows of D.
#pragma once

#include <kernelcat/fragments.cuh>
#include <kernelcat/transposed_sums.cuh>

#include "output.cuh"
