"""Programs that are made of other entries' programs, one after the other in one stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kernelcat.catalog.implementation import Param, Pointer, Program, Step, TensorMap


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """``program`` with other names of tensors and workspaces (old name -> new name).

    A name that ``names`` lacks stays as it is.
    """

    def param(old: Param) -> Param:
        kind = type(old)
        if kind is not Pointer and kind is not TensorMap:
            return old
        name = names.get(old.tensor)  # type: ignore[union-attr]
        if name is None:
            return old
        return Pointer(name) if kind is Pointer else replace(old, tensor=name)  # type: ignore[call-arg]

    def step(old: Step) -> Step:
        return Step(
            old.source, old.grid, tuple(map(param, old.params)), old.block, old.shared_bytes,
            old.cluster, old.programmatic,
        )  # fmt: skip

    workspaces = {names.get(name, name): size for name, size in program.workspaces.items()}
    return Program(tuple(map(step, program.steps)), workspaces)


def composed(*programs: Program, workspaces: Mapping[str, int]) -> Program:
    """The launches of all ``programs`` in order.

    ``workspaces`` (name -> bytes) are what the programs pass to each other. A name of 0 bytes
    stands for an optional tensor that is absent.

    Raises
    ------
    ValueError
        Two programs have a workspace of the same name: each would overwrite what the other keeps.
    """
    spaces = dict(workspaces)
    for program in programs:
        for name, size in program.workspaces.items():
            if name in spaces:
                raise ValueError(f"two programs have a workspace {name}: rename one of them")
            spaces[name] = size
    return Program(tuple(step for program in programs for step in program.steps), spaces)
