"""Peers of ``all_reduce``: NCCL through torch, and torch's symmetric memory without multicast.

torch's symmetric-memory kernels read x from a buffer of their own; x is there before the race, so
their times hold no copy of x. NCCL works in place. NVLink multicast stays off: a program that uses
it and ends badly can put the GPUs of a host out of service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernelcat.errors import MissingDependency
from kernelcat.ranks.group import Group
from kernelcat.runtime.device import Run

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment variables of a process with peers."""

Tensors = Mapping[str, Any]
"""Name -> this rank's part as a torch tensor."""


class Peers:
    """torch's process group over the ranks of ``group``, whose work runs on CuPy's ``stream``.

    Raises ``MissingDependency`` without torch.
    """

    def __init__(self, group: Group, stream: Any) -> None:
        try:
            import torch
            import torch.distributed as distributed
        except ModuleNotFoundError as error:
            raise MissingDependency("racing peers needs torch: pip install torch") from error
        self.torch, self.distributed = torch, distributed
        self.device = torch.device("cuda", group.device.index)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream.ptr, self.device))
        store = distributed.FileStore(str(group.path.with_name("torch")), group.ranks)
        distributed.init_process_group(
            "nccl", store=store, rank=group.rank, world_size=group.ranks, device_id=self.device
        )
        self.name = distributed.distributed_c10d._get_default_group().group_name

    def symmetric(self, like: Any) -> Any:
        """A buffer of torch's symmetric memory with the shape and the values of ``like``."""
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(like.shape, dtype=like.dtype, device=self.device)
        symmetric_memory.rendezvous(buffer, self.name)
        return buffer.copy_(like)

    def is_close(self, result: Any, expected: Any) -> bool:
        """Whether a result is the sum but for the rounding of partial sums to 16 bits.

        ``expected`` is the oracle's array of the same shape, as CuPy holds 16-bit types.
        """
        right = self.torch.as_tensor(expected.view("int16"), device=self.device)
        tolerance = 2.0**-4 if result.dtype == self.torch.float16 else 0.5
        right = right.view(result.dtype).float()
        return bool(self.torch.allclose(result.float(), right, rtol=2.0**-7, atol=tolerance))


Peer = Callable[[Peers, Tensors], tuple[Run, Any]]
"""Makes a run, and the tensor that holds the sum after the first run."""


def _nccl(peers: Peers, tensors: Tensors) -> tuple[Run, Any]:
    out = tensors["x"].clone()
    return lambda: peers.distributed.all_reduce(out), out


def _one_shot(peers: Peers, tensors: Tensors) -> tuple[Run, Any]:
    buffer, out = peers.symmetric(tensors["x"]), peers.torch.empty_like(tensors["x"])
    run = peers.torch.ops.symm_mem.one_shot_all_reduce_out
    return lambda: run(buffer, "sum", peers.name, out), out


def _two_shot(peers: Peers, tensors: Tensors) -> tuple[Run, Any]:
    buffer, out = peers.symmetric(tensors["x"]), peers.torch.empty_like(tensors["x"])
    run = peers.torch.ops.symm_mem.two_shot_all_reduce_out
    return lambda: run(buffer, "sum", peers.name, out), out


PEERS: Mapping[str, Peer] = {
    "nccl": _nccl,
    "torch one-shot": _one_shot,
    "torch two-shot": _two_shot,
}
