// The scales of a stage, which other entries use too.
#include <kernelcat/block_scales.cuh>
