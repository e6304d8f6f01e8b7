"""Compiled code with what is needed to launch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Artifact:
    """What a compiler made of a source for one architecture.

    Attributes
    ----------
    kernel : the symbol to launch
    code : a cubin (CUDA, Triton), or an object file with a host entry point (CuTe)
    cubin : the machine code in ``code``, for inspection; the same bytes but for CuTe
    metadata : JSON-able; always ``registers``, ``spill_bytes``, ``static_shared_bytes`` where the
        compiler tells them, and what the language's launcher needs (Triton: ``num_warps``,
        ``shared_bytes``, ``global_scratch_bytes`` ...)
    """

    language: str
    arch: str
    kernel: str
    code: bytes
    cubin: bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)
