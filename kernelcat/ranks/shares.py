"""The gate for one rank: its parts of the arrays of all ranks, between guard bands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernelcat.catalog.spec import Entry, Problem, Tensor
from kernelcat.runtime.device import Device
from kernelcat.verify import gate


def of_rank(entry: Entry) -> Entry:
    """``entry`` as one rank holds it: tensors without the axis of ranks."""

    def part(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=tensor.shape[1:])

    return replace(
        entry, inputs=tuple(map(part, entry.inputs)), outputs=tuple(map(part, entry.outputs))
    )


def prepare(
    entry: Entry,
    problem: Problem,
    device: Device,
    rank: int,
    seed: int,
    share: Callable[[int], Any] | None = None,
) -> gate.Prepared:
    """Inputs and oracle of ``rank``; every rank draws the inputs of all ranks with the same seed.

    Memory is that of :func:`kernelcat.verify.gate.prepare` for all ranks. The buffers hold the
    inputs, and poison in the outputs. ``share`` allocates mapped tensors (``Group.share``).
    """
    whole, part = gate.prepare(entry, problem, device, seed), of_rank(entry)
    prepared = replace(
        whole,
        entry=part,
        buffers={tensor.name: gate.Buffer.poisoned(
                     tensor, problem, device.xp, share if tensor.mapped else None)
                 for tensor in part.present(problem)},
        expected={name: array[rank].copy() for name, array in whole.expected.items()},
        pristine={name: array[rank].copy() for name, array in whole.pristine.items()},
        kept={name: array[rank].copy() for name, array in whole.kept.items()},
    )  # fmt: skip
    prepared.reset()
    return prepared
