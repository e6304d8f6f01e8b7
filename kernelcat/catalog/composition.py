"""Programs that are made of other entries' programs, one after the other in one stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from kernelcat.catalog.implementation import Param, Pointer, Program, Step, TensorMap


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """``program`` with other names of tensors and workspaces (old name -> new name).

    A name that ``names`` lacks stays as it is.
    """

    def step(old: Step) -> Step:
        params: list[Param] = []
        for param in old.params:
            new: Param = param
            if isinstance(param, Pointer):
                if (name := names.get(param.tensor)) is not None:
                    new = _pointer(name)
            elif isinstance(param, TensorMap) and (name := names.get(param.tensor)) is not None:
                new = TensorMap(
                    name, param.dtype, param.shape, param.strides, param.box, param.swizzle,
                    param.l2_promotion,
                )  # fmt: skip
            params.append(new)
        return Step(
            old.source, old.grid, tuple(params), old.block, old.shared_bytes, old.cluster,
            old.programmatic, old.max_carveout,
        )  # fmt: skip

    workspaces = {names.get(name, name): size for name, size in program.workspaces.items()}
    return Program(tuple(map(step, program.steps)), workspaces)


_pointer = lru_cache(1024)(Pointer)
"""The names are few, and a first call of a new size renames dozens of pointers."""


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
