"""Copy through shared memory by TMA: one warp a CTA keeps a ring of boxes in flight.

A box is loaded and stored from the same buffer, so no thread ever touches the data. TMA leaves out
what lies outside the matrix, in loads and in stores, but a store in units of 16 bytes: rows must
end at a multiple of that.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

LAG = 2
"""Boxes whose stores may still be reading shared memory while the next loads are started."""


class TensorMap:
    """``rows`` x ``cols`` elements in boxes of ``box_rows`` x ``box_cols``, ``stages`` in flight.

    Elements are plain bits of ``element_bytes``; strides are multiples of 16 bytes.
    """

    def __init__(self, element_bytes: int, box_rows: int, box_cols: int, stages: int):
        names = {1: "Uint8", 2: "Uint16", 4: "Uint32"}
        self.element, self.element_bytes = getattr(cutlass, names[element_bytes]), element_bytes
        self.box, self.stages = (box_rows, box_cols), stages

    @cute.jit
    def __call__(
        self,
        src: cute.Pointer,  # (rows, cols), rows src_stride elements apart
        dst: cute.Pointer,  # (rows, cols), rows dst_stride elements apart
        rows: Int64,
        cols: Int64,
        src_stride: Int64,
        dst_stride: Int64,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        layout = cute.make_ordered_layout(self.box, order=(1, 0))
        load, tS = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            self.view(src, rows, cols, src_stride),
            layout,
            self.box,
        )
        store, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            self.view(dst, rows, cols, dst_stride),
            layout,
            self.box,
        )
        boxes_m = Int32(cute.ceil_div(rows, self.box[0]))
        boxes_n = Int32(cute.ceil_div(cols, self.box[1]))
        self.kernel(load, tS, store, tD, boxes_m, boxes_n).launch(
            grid=(num_ctas, 1, 1), block=(32, 1, 1), stream=stream
        )

    def view(self, pointer, rows, cols, stride):
        stride = cute.assume(stride, divby=16 // self.element_bytes)
        pointer = cute.recast_ptr(pointer, dtype=self.element)
        return cute.make_tensor(pointer, cute.make_layout((rows, cols), stride=(stride, 1)))

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        tS: cute.Tensor,
        store: cute.CopyAtom,
        tD: cute.Tensor,
        boxes_m: Int32,
        boxes_n: Int32,
    ):
        cpasync.prefetch_descriptor(load)
        cpasync.prefetch_descriptor(store)
        shared = SmemAllocator()
        full = shared.allocate_array(cutlass.Int64, self.stages)
        layout = cute.make_ordered_layout((*self.box, self.stages), order=(1, 0, 2))
        sX = shared.allocate_tensor(self.element, layout, 128)
        if cute.arch.lane_idx() == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        one = cute.make_layout(1)
        flat = cute.group_modes(sX, 0, 2)
        tLsX, tLgS = cpasync.tma_partition(
            load, 0, one, flat, cute.group_modes(cute.local_tile(tS, self.box, (None, None)), 0, 2)
        )
        tSsX, tSgD = cpasync.tma_partition(
            store, 0, one, flat, cute.group_modes(cute.local_tile(tD, self.box, (None, None)), 0, 2)
        )
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        count = (boxes_m * boxes_n - first + step - 1) // step
        box_bytes = self.box[0] * self.box[1] * self.element_bytes

        for i in cutlass.range_constexpr(self.stages - LAG):
            if i < count:
                box = first + i * step
                self.start(load, tLgS, tLsX, full, box // boxes_n, box % boxes_n, i, box_bytes)
        for i in cutlass.range(count, unroll=1):
            ahead = i + self.stages - LAG
            if ahead < count:
                # The stage's last store, LAG boxes ago, must have read it.
                cute.arch.cp_async_bulk_wait_group(LAG - 1, read=True)
                box = first + ahead * step
                self.start(
                    load, tLgS, tLsX, full,
                    box // boxes_n, box % boxes_n, ahead % self.stages, box_bytes,
                )  # fmt: skip
            stage = i % self.stages
            cute.arch.mbarrier_wait(full + stage, i // self.stages % 2)
            box = first + i * step
            cute.copy(store, tSsX[None, stage], tSgD[None, box // boxes_n, box % boxes_n])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def start(
        self,
        load: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Tensor,
        full: cute.Pointer,
        row: Int32,
        col: Int32,
        stage: Int32,
        box_bytes: cutlass.Constexpr[int],
    ):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, box_bytes)
        cute.copy(load, source[None, row, col], target[None, stage], tma_bar_ptr=full + stage)
