"""Locks: files that fix which kernel serves which problem, down to its machine code.

A lock is JSON with an item for each problem and GPU, in a fixed order, so that versions of a file
can be compared line by line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.errors import StoreError

FORMAT = 1


@dataclass(frozen=True)
class Locked:
    """The kernel that serves one problem on GPUs of one SKU.

    Attributes
    ----------
    gpu : SKU
    implementation, config : ``gemm/cuda/wgmma`` and its configuration
    code : digests of the launches and of the machine code (``kernelcat.verify.machine_code``)
    toolchain : the compiler that the machine code is from
    why : why dispatch chose the kernel when the lock was written
    """

    gpu: str
    problem: Problem
    implementation: str
    config: Config
    code: str
    toolchain: str
    why: str

    @property
    def key(self) -> tuple[str, Problem]:
        """What a call is looked up by."""
        return self.gpu, self.problem

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "entry": self.problem.entry,
            "problem": dict(self.problem.values),
            "config": dict(self.config),
        }


def read(path: Path) -> dict[tuple[str, Problem], Locked]:
    """The items of a lock by GPU and problem.

    Raises
    ------
    StoreError
        The file cannot be read, is no lock, or has two items for one problem and GPU.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(
                f"its format is {content['format']!r}, and this version reads {FORMAT}"
            )
        items = [_parse(fields) for fields in content["locked"]]
    except OSError as error:
        raise StoreError(f"cannot read the lock {path} ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is no lock: {type(error).__name__}: {error}") from error
    found = {item.key: item for item in items}
    if len(found) != len(items):
        raise StoreError(f"{path} is no lock: a problem is in it twice for one GPU")
    return found


def write(path: Path, items: Iterable[Locked], facts: Mapping[str, Any]) -> None:
    """Write a lock in one step; ``facts`` are JSON data for people. Raises ``StoreError``."""
    ordered = sorted(items, key=lambda item: (item.gpu, item.problem.entry, item.problem.key))
    content = {"format": FORMAT, **facts, "locked": [item.to_json() for item in ordered]}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write the lock {path} ({error.strerror})") from error


def _parse(fields: dict[str, Any]) -> Locked:
    fields = dict(fields)
    problem = Problem.of(fields.pop("entry"), **fields.pop("problem"))
    item = Locked(problem=problem, config=Config(fields.pop("config")), **fields)
    texts = (item.gpu, item.implementation, item.code, item.toolchain, item.why)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a field has another type")
    if item.implementation.count("/") != 2 or item.code.count(".") != 1:
        raise ValueError(f"{item.implementation} {item.code} names no kernel and its digests")
    return item
