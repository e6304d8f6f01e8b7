"""Locks on dispatch: calls use exactly the kernels of a file, or fail with one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import LockError, MissingDependency, Unsupported

if TYPE_CHECKING:
    from kernelcat.call.choice import Pin
    from kernelcat.runtime.gpu import Gpu
    from kernelcat.store.lock import Locked


class Ruling(NamedTuple):
    """What the active lock says of a problem: its kernel, or why the lock does not apply."""

    locked: Locked | None = None
    unlocked: str | None = None


NO_RULING = Ruling()
"""What is said while no lock is in use."""


@dataclass(frozen=True)
class _Active:
    path: Path
    items: dict[tuple[str, Problem], Locked]
    strict: bool


_active: _Active | None = None


class use_lock:
    """Serve calls by exactly the kernels of a lock, a file that ``kernelcat lock`` wrote.

    ``kernelcat.use_lock(FILE)`` turns the lock on for all threads, and ``use_lock(None)`` off;
    ``with kernelcat.use_lock(FILE):`` turns it on for a block. For a problem of the lock, neither
    the database nor what else is installed decides: the implementation and the configuration are
    those of the lock. When a kernel is built, its machine code and its launches are compared with
    the digests of the lock.

    A problem that is not in the lock (of another shape, or on another SKU) is served as without a
    lock, and ``explain`` says so; with ``strict`` its call raises ``Unsupported``. A call that pins
    a language, variant or configuration other than the lock's goes by the pin. Plans and bound
    calls that were made before keep their kernels. Other processes call this function themselves.

    Raises
    ------
    StoreError
        The file cannot be read or is no lock.
    LockError
        Raised by a call: what would run differs from the lock. Nothing is launched.
    """

    def __init__(self, path: str | Path | None, strict: bool = False) -> None:
        from kernelcat.store import lock

        self._before = _active
        items = {} if path is None else lock.read(Path(path))
        _activate(None if path is None else _Active(Path(path), items, strict))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _activate(self._before)


def _activate(active: _Active | None) -> None:
    from kernelcat.call import registry

    global _active
    _active = active
    registry.reload()


def ruling(problem: Problem, gpu: Gpu, pin: Pin) -> Ruling:
    """What the active lock says of ``problem`` on ``gpu``.

    Raises ``Unsupported`` where the lock is strict, the problem is not in it, and no configuration
    is pinned.
    """
    active = _active
    if active is None:
        return NO_RULING
    locked = active.items.get((gpu.sku, problem))
    if locked is None:
        reason = f"{active.path} has no {problem.entry} {problem} on {gpu.sku}"
        if active.strict and pin.config is None:
            raise Unsupported(f"{reason}, and kernelcat.use_lock was called with strict=True")
        return Ruling(unlocked=f"{reason}: chosen as without a lock")
    _, language, variant = locked.implementation.split("/")
    if not pin.allows(language, variant) or pin.config not in (None, locked.config):
        return Ruling(unlocked=f"{active.path} has {locked.implementation}; the call pins another")
    return Ruling(locked)


def verify(locked: Locked, implementation: Implementation, gpu: Gpu) -> None:
    """Raise ``LockError`` unless today's launches and machine code are those of the lock."""
    code = code_of(implementation, locked.problem, locked.config, gpu)
    if code == locked.code:
        return
    kinds = ("launches", "machine code")
    pairs = zip(kinds, locked.code.split("."), code.split("."), strict=True)
    what = " and ".join(kind for kind, then, now in pairs if then != now)
    here = toolchain(implementation, locked.problem, locked.config, gpu)
    raise LockError(
        f"{locked.implementation} {dict(locked.config)} for {locked.problem} is not as locked: "
        f"other {what} ({locked.code} by {locked.toolchain}; here {code} by {here})"
    )


def code_of(implementation: Implementation, problem: Problem, config: Config, gpu: Gpu) -> str:
    """Digests of the launches and of the machine code, joined by a dot."""
    from kernelcat.verify import machine_code
    from kernelcat.verify.code_record import Case

    return machine_code.exact_code(implementation, Case(problem, config), gpu).text


def toolchain(implementation: Implementation, problem: Problem, config: Config, gpu: Gpu) -> str:
    """The compiler of a configuration's kernels: ``nvrtc 13.0.88, runtime 13.0.96, ...``."""
    steps: Any = implementation.program(problem, config, gpu).steps
    try:
        return "; ".join(sorted({step.source.toolchain() for step in steps})) or "no compiler"
    except MissingDependency:
        return "a prepared folder"
