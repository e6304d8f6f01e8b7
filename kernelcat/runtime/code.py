"""Loaded code: a source is compiled and loaded once, and equal machine code is loaded once.

Launchers of problems that differ in sizes only share their code: what differs are launch values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from ctypes import c_void_p
from math import prod
from typing import Any

from kernelcat.bounded import Bounded
from kernelcat.catalog.implementation import Source
from kernelcat.jit import Artifact, build
from kernelcat.runtime import driver

_DEFAULT_SHARED_BYTES = 48 << 10  # shared memory that a kernel may use without an attribute
_PORTABLE_CLUSTER = 8  # thread blocks of a cluster that need no attribute


class Code:
    """A kernel that is loaded into GPU ``device``.

    Attributes
    ----------
    function : a CUfunction, or a callable for CuTe
    language, metadata : those of the artifact
    """

    __slots__ = ("_device", "_limits", "function", "language", "metadata")

    def __init__(self, artifact: Artifact, device: int) -> None:
        self.language, self.metadata = artifact.language, artifact.metadata
        self._device, self._limits = device, {0: 0}
        if artifact.language == "cute":
            self.function: Any = host_function(artifact, device)
        else:
            self.function = function(artifact.code, artifact.kernel, device)

    def allow(
        self, shared_bytes: int, cluster: tuple[int, int, int], max_carveout: bool = False
    ) -> None:
        """Raise the limits of the function where a launch needs more than the default.

        ``shared_bytes`` counts dynamic shared memory; ``max_carveout`` is as in ``Step``. Raises
        ``LaunchError``.
        """
        if shared_bytes + self.metadata.get("static_shared_bytes", 0) > _DEFAULT_SHARED_BYTES:
            self._raise(driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        if prod(cluster) > _PORTABLE_CLUSTER:
            self._raise(driver.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if max_carveout:
            self._raise(driver.PREFERRED_SHARED_MEMORY_CARVEOUT, 100)

    def _raise(self, attribute: int, value: int) -> None:
        if self._limits.get(attribute, 0) < value:
            driver.opened().raise_limit(self.function, attribute, value, self._device)
            self._limits[attribute] = value


_of_sources = Bounded[tuple[Source, str, int], Code](1024)
"""(source, architecture, GPU) -> its code. Neither text nor digest of a source is computed anew."""


def of_source(source: Source, arch: str, device: int) -> Code:
    """The code of ``source``, which is compiled and loaded once in a process.

    A file that changes later has an effect after :func:`forget`. Raises ``CompileError``,
    ``MissingDependency`` and ``LaunchError``.
    """
    code = _of_sources.get((source, arch, device))
    if code is None:
        code = _of_sources[source, arch, device] = Code(build(source, arch), device)
    return code


def forget() -> None:
    """Look for artifacts of sources again; what is loaded stays loaded while it is used."""
    _of_sources.clear()


_functions = Bounded[tuple[bytes, str, int], c_void_p](1024)
"""(digest of a cubin, kernel, GPU) -> loaded function: equal cubins are loaded once.

A function that is forgotten here stays loaded as long as a launcher has it.
"""


def function(code: bytes, name: str, device: int) -> c_void_p:
    """The function ``name`` of the cubin ``code`` on GPU ``device``."""
    key = (hashlib.sha256(code).digest(), name, device)
    loaded = _functions.get(key)
    if loaded is None:
        loaded = _functions[key] = driver.opened().function(code, name, device)
    return loaded


_host_functions = Bounded[tuple[bytes, tuple[str, ...], int], Callable[..., None]](64)
"""(digest of an object file, kinds of its parameters, GPU) -> loaded host function of CuTe.

Problems that differ in sizes only have the same object file, which takes megabytes of host memory
while it is loaded. Calls of a host function wait for each other while it launches.
"""


def host_function(artifact: Artifact, device: int) -> Callable[..., None]:
    """The host function in an object file of CuTe, loaded for GPU ``device``."""
    from kernelcat.jit import cute

    kinds = tuple(artifact.metadata["params"])
    key = (hashlib.sha256(artifact.code).digest(), kinds, device)
    call = _host_functions.get(key)
    if call is None:
        with driver.opened().using(device):
            call = _host_functions[key] = cute.load(artifact)
    return call
