"""Copy through shared memory by TMA: a thread block is one warp with a ring of boxes in flight.

A box is loaded into a stage and stored from the same stage, so no thread touches the data. TMA
leaves out what lies outside the matrix, in loads and in stores. A store does so in units of 16
bytes: the length of a row must be a multiple of 16 bytes.

    barrier      who arrives (how many)         who waits   for what
    full[stage]  one thread (1) and TMA, bytes  the warp    a box has arrived

There is no empty barrier: before a stage is loaded again, the warp waits until the store of the
stage's last box has read it (``cp.async.bulk.wait_group``). ``LAG`` stores may be under way.
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
    """Copies ``rows`` x ``cols`` elements in boxes of ``box_rows`` x ``box_cols``.

    ``num_stages`` boxes are in flight. Elements are ``element_bytes`` of plain bits; strides are
    multiples of 16 bytes.
    """

    def __init__(self, element_bytes: int, box_rows: int, box_cols: int, num_stages: int):
        names = {1: "Uint8", 2: "Uint16", 4: "Uint32"}
        self.element, self.element_bytes = getattr(cutlass, names[element_bytes]), element_bytes
        self.box, self.num_stages = (box_rows, box_cols), num_stages

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
        num_boxes_m = Int32(cute.ceil_div(rows, self.box[0]))
        num_boxes_n = Int32(cute.ceil_div(cols, self.box[1]))
        self.kernel(load, tS, store, tD, num_boxes_m, num_boxes_n).launch(
            grid=(num_ctas, 1, 1), block=(32, 1, 1), stream=stream
        )

    def view(self, pointer, rows, cols, stride):
        """(rows, cols) elements at ``pointer``, rows ``stride`` elements apart."""
        stride = cute.assume(stride, divby=16 // self.element_bytes)
        pointer = cute.recast_ptr(pointer, dtype=self.element)
        return cute.make_tensor(pointer, cute.make_layout((rows, cols), stride=(stride, 1)))

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        tS: cute.Tensor,  # (rows, cols), coordinates for TMA
        store: cute.CopyAtom,
        tD: cute.Tensor,  # (rows, cols), coordinates for TMA
        num_boxes_m: Int32,
        num_boxes_n: Int32,
    ):
        cpasync.prefetch_descriptor(load)
        cpasync.prefetch_descriptor(store)
        shared = SmemAllocator()
        full = shared.allocate_array(cutlass.Int64, self.num_stages)
        layout = cute.make_ordered_layout((*self.box, self.num_stages), order=(1, 0, 2))
        sX = shared.allocate_tensor(self.element, layout, 128)
        if cute.arch.lane_idx() == 0:
            for stage in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        one = cute.make_layout(1)
        stages = cute.group_modes(sX, 0, 2)
        gS, gD = (cute.local_tile(t, self.box, (None, None)) for t in (tS, tD))
        tLsX, tLgS = cpasync.tma_partition(load, 0, one, stages, cute.group_modes(gS, 0, 2))
        tSsX, tSgD = cpasync.tma_partition(store, 0, one, stages, cute.group_modes(gD, 0, 2))
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        count = (num_boxes_m * num_boxes_n - first + step - 1) // step
        box_bytes = self.box[0] * self.box[1] * self.element_bytes

        for i in cutlass.range_constexpr(self.num_stages - LAG):
            if i < count:
                box = first + i * step
                row, col = box // num_boxes_n, box % num_boxes_n
                self.start_load(load, tLgS, tLsX, full, row, col, i, box_bytes)
        for i in cutlass.range(count, unroll=1):
            ahead = i + self.num_stages - LAG
            if ahead < count:
                # The stage's last store, LAG boxes ago, must have read it.
                cute.arch.cp_async_bulk_wait_group(LAG - 1, read=True)
                box = first + ahead * step
                row, col = box // num_boxes_n, box % num_boxes_n
                stage = ahead % self.num_stages
                self.start_load(load, tLgS, tLsX, full, row, col, stage, box_bytes)
            stage = i % self.num_stages
            cute.arch.mbarrier_wait(full + stage, i // self.num_stages % 2)
            box = first + i * step
            cute.copy(store, tSsX[None, stage], tSgD[None, box // num_boxes_n, box % num_boxes_n])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def start_load(
        self,
        load: cute.CopyAtom,
        source: cute.Tensor,  # (box, boxes along the rows, boxes along the columns)
        target: cute.Tensor,  # (box, stages)
        full: cute.Pointer,  # (stages,) mbarriers
        row: Int32,
        col: Int32,
        stage: Int32,
        box_bytes: cutlass.Constexpr[int],
    ):
        """Start loading box (``row``, ``col``) into a stage."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, box_bytes)
        cute.copy(load, source[None, row, col], target[None, stage], tma_bar_ptr=full + stage)
