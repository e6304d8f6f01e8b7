"""Peers of several ranks: NCCL through torch, and torch's symmetric memory without multicast.

torch's symmetric-memory kernels read x from a buffer of their own; x is there before the race, so
their times hold no copy of x. NCCL's all-reduce works in place. Its all-to-all moves the rows of a
dispatch or a combine, packed by rank before the race, by counts that the host knows: packing,
scales, weights, index maps and sums are not in its time. It moves pages of caches so too, and does
not put them into their places. NVLink multicast stays off: a program that
uses it and ends badly can put the GPUs of a host out of service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
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
        self.torch, self.distributed, self.group = torch, distributed, group
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

    def bits(self, array: Any) -> Any:
        """The bits of a contiguous CuPy array as torch's int32, of a quarter or half the columns.

        NCCL moves no 16-bit integers.
        """
        return self.torch.as_tensor(array.view("int32"), device=self.device)


Peer = Callable[[Peers, Tensors, Mapping[str, Any]], tuple[Run, Callable[[], bool]]]
"""Makes a run, and a function that says on every rank whether the first run was right.

The last argument has the oracle's arrays of this rank by output."""


def _require_sum_alone(tensors: Tensors) -> None:
    if len(tensors) > 2:
        raise RuntimeError("it sums up alone, without a residual and a norm")


def _nccl(peers: Peers, tensors: Tensors, expected: Mapping[str, Any]) -> Any:
    _require_sum_alone(tensors)
    out = tensors["x"].clone()
    return lambda: peers.distributed.all_reduce(out), lambda: peers.is_close(out, expected["out"])


def _one_shot(peers: Peers, tensors: Tensors, expected: Mapping[str, Any]) -> Any:
    return _symmetric(peers, tensors, expected, "one_shot_all_reduce_out")


def _two_shot(peers: Peers, tensors: Tensors, expected: Mapping[str, Any]) -> Any:
    return _symmetric(peers, tensors, expected, "two_shot_all_reduce_out")


def _symmetric(peers: Peers, tensors: Tensors, expected: Mapping[str, Any], name: str) -> Any:
    _require_sum_alone(tensors)
    buffer, out = peers.symmetric(tensors["x"]), peers.torch.empty_like(tensors["x"])
    run = getattr(peers.torch.ops.symm_mem, name)
    return (
        lambda: run(buffer, "sum", peers.name, out),
        lambda: peers.is_close(out, expected["out"]),
    )


def _dispatched(peers: Peers, tensors: Tensors, expected: Mapping[str, Any]) -> Any:
    received = _counts(expected["row_of"])
    rows = peers.bits(expected["rows"][: sum(received)])
    sent_to = [counts[peers.group.rank] for counts in peers.group.rendezvous.gather(received)[0]]
    sent = _exchanged(peers, rows, received, sent_to)  # where the rows came from
    return _all_to_all(peers, sent, sent_to, received, rows)


def _combined(peers: Peers, tensors: Tensors, expected: Mapping[str, Any]) -> Any:
    sent_to = [int(count) for count in (tensors["row_of"] >= 0).sum(1)]
    received = [counts[peers.group.rank] for counts in peers.group.rendezvous.gather(sent_to)[0]]
    sums = tensors["sums"][: sum(sent_to)]
    parts = _exchanged(peers, sums, sent_to, received)
    return _all_to_all(peers, sums, sent_to, received, parts)


def _counts(row_of: Any) -> list[int]:
    """How many tokens of each rank have a row; ``row_of`` is (ranks, tokens)."""
    return [int(count) for count in (row_of >= 0).sum(axis=1)]


def _exchanged(peers: Peers, rows: Any, sent: list[int], received: list[int]) -> Any:
    """What this rank gets where ``rows`` are packed by the rank that each goes to."""
    out = peers.torch.empty((sum(received), rows.shape[1]), dtype=rows.dtype, device=peers.device)
    peers.distributed.all_to_all_single(out, rows, received, sent)
    return out


def _all_to_all(
    peers: Peers, rows: Any, sent: list[int], received: list[int], expected: Any
) -> tuple[Run, Callable[[], bool]]:
    out = peers.torch.zeros_like(expected)

    def run() -> None:
        peers.distributed.all_to_all_single(out, rows, received, sent)

    return run, lambda: bool(peers.torch.equal(out, expected))


def _transferred(peers: Peers, tensors: Tensors, expected: Mapping[str, Any]) -> Any:
    caches = [name for name in ("k_cache", "v_cache") if name in tensors]
    names = ("source_pages", "dest_ranks", "dest_pages")
    sources, ranks, pages = (tensors[name].tolist() for name in names)
    entries = list(zip(ranks, sources, pages, strict=True))
    sent = [[e for e in entries if e[0] == rank] for rank in range(peers.group.ranks)]
    coming = [lists[peers.group.rank] for lists in peers.group.rendezvous.gather(sent)[0]]
    packed = _pages(peers, [tensors[name] for name in caches], [e[1] for e in chain(*sent)])
    right = [peers.torch.as_tensor(expected[name].view("uint8"), device=peers.device)
             for name in caches]  # fmt: skip
    rows = _pages(peers, right, [e[2] for e in chain(*coming)])
    return _all_to_all(peers, packed, [*map(len, sent)], [*map(len, coming)], rows)


def _pages(peers: Peers, caches: Sequence[Any], pages: Sequence[int]) -> Any:
    """The bytes of these pages of all caches, a row a page."""
    index = peers.torch.tensor(pages, dtype=peers.torch.int64, device=peers.device)
    rows = (cache.view(peers.torch.uint8).flatten(1).index_select(0, index) for cache in caches)
    return peers.torch.cat(list(rows), 1)


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "all_reduce": {"nccl": _nccl, "torch-one-shot": _one_shot, "torch-two-shot": _two_shot},
    "kv_transfer": {"nccl-all-to-all": _transferred},
    "moe_combine": {"nccl-all-to-all": _combined},
    "moe_dispatch": {"nccl-all-to-all": _dispatched},
}
"""Entry -> name -> peer."""
