"""Compiled code, with the metadata that a launch needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Artifact:
    """A source compiled for one architecture.

    Attributes
    ----------
    language, arch : language of the source; the architecture (``sm_90a``)
    kernel : the symbol to launch
    code : a cubin (CUDA, Triton), or an object file with a host entry point (CuTe)
    cubin : the machine code in ``code``, for inspection; equal to ``code`` for CUDA and Triton
    metadata
        JSON data. ``registers``, ``spill_bytes`` and ``static_shared_bytes`` where the compiler
        reports them, and what the launcher of the language needs (Triton: ``num_warps``,
        ``shared_bytes``, ``global_scratch_bytes`` and others).
    """

    language: str
    arch: str
    kernel: str
    code: bytes
    cubin: bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)
