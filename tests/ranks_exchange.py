"""A rank whose exchange is that of GPUs, with kernels on the CPU: ``RANK RANKS FOLDER``.

It calls everything that an exchange has, twice, beside the exchange of hosts, and prints what
differs, or the names of the kernels that have run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_fibers
import ranks_machine
import torch

from kernelcat.moe.parallel import device_exchange
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.host_exchange import HostExchange
from kernelcat.ranks import group

TOKENS, HIDDEN, LOCAL, TOP_K = 3, 256, 4, 2
names: list[str] = []


def prepare(name: str, program: Any, find: Any, tensors: Sequence[str], device: int) -> Any:
    """A launcher that runs the program on the CPU."""

    def launch(pointers: Sequence[int], stream: int) -> None:
        names.append(name)
        arrays = {
            tensor: SimpleNamespace(__array_interface__={"data": (pointer, False)})
            for tensor, pointer in zip(tensors, pointers, strict=True)
            if pointer
        }
        cuda_fibers.run(program, arrays, ranks_machine.MAX_BLOCKS, seed=1)

    return launch


def results(exchange: Exchange) -> list[torch.Tensor]:
    """Outputs of all calls; of rows that nobody has sent there are none."""
    generator = torch.Generator().manual_seed(exchange.rank)
    x, residual = torch.randn(2, TOKENS, HIDDEN, generator=generator).bfloat16()
    weight = residual[0]
    ids = torch.stack([torch.randperm(LOCAL * exchange.ranks, generator=generator)[:TOP_K].int()
                       for _ in range(TOKENS)])  # fmt: skip
    gates = torch.rand(ids.shape, generator=generator)
    given = torch.full((2, LOCAL + 4), -5, dtype=torch.int32)  # LOCAL + 4 numbers are 32 bytes
    come = exchange.dispatch(x, ids, gates, LOCAL, offsets=given[1, : LOCAL + 1])
    count = int(come.source_offsets[-1])
    sums = torch.nn.functional.pad(2 * come.rows[:count], (0, 0, 0, len(come.rows) - count))
    return [
        exchange.all_reduce(x),
        exchange.all_reduce(x, residual),
        *exchange.all_reduce_norm(x, residual, weight, 1e-5),
        exchange.all_gather(torch.arange(4, dtype=torch.int32).view(2, 2) - exchange.rank),
        *(come.rows[:count], come.gates[:count], come.row_of, given, come.order),
        exchange.combine(sums, come.row_of, ids, LOCAL, residual),
    ]


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks_machine.stand_in()
    module: Any = group
    module.launcher = SimpleNamespace(prepare=prepare, Launcher=object)
    module = device_exchange
    module.CudaDevice = lambda gpu: ranks_machine.Device()
    module = torch.cuda
    module.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
    module.is_current_stream_capturing = lambda: False
    mine = device_exchange.DeviceExchange(rank, ranks, folder / "device", 0)
    oracle = HostExchange(rank, ranks, folder / "host")
    wrong = []
    for number in range(2):
        if number:
            mine.start()
        for i, (a, b) in enumerate(zip(results(mine), results(oracle), strict=True)):
            if a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=2**-7):
                wrong.append(f"result {i} of call {number}")
    mine.check()
    for exchange in (mine, oracle):
        exchange.close()
    print(json.dumps({"wrong": wrong, "kernels": names}))


if __name__ == "__main__":
    main()
