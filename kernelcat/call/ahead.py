"""Compilation ahead of calls: what dispatch would choose, built for a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from kernelcat import __version__, catalog, jit, store
from kernelcat.call.building import build
from kernelcat.call.choice import Decision, Pin
from kernelcat.call.locking import NO_RULING, Ruling, code_of, toolchain
from kernelcat.call.sharing import Choices
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, KernelcatError, UnknownName
from kernelcat.jit import Artifact, bundle
from kernelcat.jit.cache import portable_key
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import lock
from kernelcat.store.lock import Locked
from kernelcat.store.workload import Use


class Asked(NamedTuple):
    """A problem that will be called, what the caller pins, and what a lock says."""

    problem: Problem
    pin: Pin = Pin()
    ruling: Ruling = NO_RULING

    @property
    def name(self) -> str:
        """``gemm 4096x4096x4096``, or the axes of a problem without a name."""
        entry = catalog.entry(self.problem.entry)
        return f"{entry.name} {entry.problem_name(self.problem) or self.problem}"


@dataclass
class BuildReport:
    """What was built.

    Attributes
    ----------
    folder, gpu : the bundle's folder; SKU
    sha256 : the digest that names the bundle
    kernels, bytes : number of artifacts, and the bytes of their code
    served : name of a problem -> implementation and configuration
    refused : name of a problem -> why nothing serves it there
    """

    folder: str
    gpu: str
    sha256: str = ""
    kernels: int = 0
    bytes: int = 0
    served: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def named(entry: str | None, language: str | None = None) -> list[Asked]:
    """The named problems of ``entry``, or of all entries that have kernels."""
    names = [entry] if entry is not None else [n for n in catalog.names() if catalog.languages(n)]
    entries = [catalog.entry(name) for name in names]
    return [Asked(p, Pin(language)) for each in entries for p in each.problems.values()]


def recorded(
    uses: Iterable[Use], entry: str | None = None, language: str | None = None
) -> tuple[list[Asked], dict[str, str]]:
    """The problems of a workload without duplicates, in its order; and those of no use, with why.

    A call that pinned its kernel is built as pinned. ``entry`` restricts to that entry's problems.
    """
    asked: dict[Asked, None] = {}
    refused = {}
    for use in uses:
        if entry not in (None, use.entry):
            continue
        try:
            problem = catalog.entry(use.entry).problem(**use.problem)
            pin = Pin(language)
            if use.why == "forced":
                _, its_language, variant = use.served.split("/")
                pin = Pin(
                    its_language, variant, Config(cast("Mapping[str, ConfigValue]", use.config))
                )
            asked[Asked(problem, pin)] = None
        except (UnknownName, InvalidArgument, ValueError) as error:
            refused[f"{use.entry} {use.asked}"] = str(error)
    return list(asked), refused


def locked_problems(path: Path, gpu: Gpu, entry: str | None = None) -> list[Asked]:
    """The problems that a lock has for ``gpu``, with its kernels."""
    items = lock.read(path).values()
    chosen = [i for i in items if i.gpu == gpu.sku and entry in (None, i.problem.entry)]
    return [Asked(item.problem, ruling=Ruling(item)) for item in chosen]


def decide(asked: Asked, gpu: Gpu, known: store.Snapshot) -> tuple[Decision, dict[str, Artifact]]:
    """What dispatch chooses for a problem on ``gpu``, compiled: artifacts by portable key.

    Raises ``Unsupported``, ``LockError`` or the compiler's error, as a call does.
    """
    entry = catalog.entry(asked.problem.entry)
    asked.pin.check(entry)
    choices = Choices(entry, asked.pin, known.choices(entry.name), known.refuted(entry.name))
    return build(choices, asked.problem, gpu, compiled, asked.ruling)


def compiled(
    implementation: Implementation, problem: Problem, config: Config, gpu: Gpu
) -> dict[str, Artifact]:
    """The artifacts of a configuration for a problem, by portable key."""
    steps = implementation.program(problem, config, gpu).steps
    return {portable_key(s.source, gpu.arch): jit.build(s.source, gpu.arch) for s in steps}


def build_bundle(
    asked: Iterable[Asked],
    gpu: Gpu,
    folder: Path,
    refused: Mapping[str, str] | None = None,
    done: Callable[[str, str], None] = lambda problem, served: None,
) -> BuildReport:
    """Compile what dispatch would choose for each problem, and write the bundle ``folder``.

    ``done`` is called with the name of each problem and what serves it. ``refused`` are problems
    that the caller could not ask for, with the reason; they are reported, too.

    Raises
    ------
    InvalidArgument
        The folder has files, or no problem can be served.
    """
    report = BuildReport(str(folder), gpu.sku, refused=dict(refused or {}))
    if folder.exists() and any(folder.iterdir()):  # before minutes of compilation
        raise InvalidArgument(f"{folder} is not empty: name a new folder")
    known, artifacts = store.snapshot(), dict[str, Artifact]()
    for each in asked:
        try:
            decision, made = decide(each, gpu, known)
        except KernelcatError as error:
            report.refused[each.name] = str(error)
            done(each.name, f"not built: {error}")
            continue
        artifacts |= made
        chosen = f"{decision.implementation.name} {dict(decision.config)} ({decision.why})"
        report.served[each.name] = chosen
        done(each.name, chosen)
    if not report.served:
        reason = next(iter(report.refused.values()), "there is no problem")
        raise InvalidArgument(f"nothing was built for {gpu.sku}: {reason}")
    facts = {"gpu": gpu.sku, "arch": gpu.arch, "served": report.served}
    report.sha256 = bundle.write(folder, artifacts, facts)
    report.kernels = len(artifacts)
    report.bytes = sum(len(artifact.code) for artifact in artifacts.values())
    return report


@dataclass
class LockReport:
    """What was locked: the file, its items, and name of a problem -> why it is not in the lock."""

    file: str
    locked: list[Locked] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def write_lock(
    uses: Iterable[Use],
    path: Path,
    only: Gpu | None = None,
    done: Callable[[str, str], None] = lambda problem, served: None,
) -> LockReport:
    """Compile what dispatch chooses today for the problems of a workload, and lock it in ``path``.

    Calls that pinned a configuration are left out, because a lock does not change them. The GPUs
    are those of the workload; with ``only``, all of its problems are locked for that one. ``done``
    is called with the name of each problem and what serves it.

    Raises
    ------
    InvalidArgument
        No problem can be locked.
    StoreError
        The file cannot be written.
    """
    report, known = LockReport(str(path)), store.snapshot()
    free = [use for use in uses if use.why != "forced"]
    skus = [only.sku] if only is not None else sorted({use.gpu for use in free})
    for sku in skus:
        asked, refused = recorded(use for use in free if only is not None or use.gpu == sku)
        report.refused |= refused
        for each in asked:
            try:
                gpu = only or gpus.find(sku)
                decision, _ = decide(each, gpu, known)
                case = (decision.implementation, each.problem, decision.config, gpu)
                code, compiler = code_of(*case), toolchain(*case)
            except KernelcatError as error:
                report.refused[f"{each.name} on {sku}"] = str(error)
                done(each.name, f"not locked: {error}")
                continue
            name = decision.implementation.name
            report.locked.append(
                Locked(gpu.sku, each.problem, name, decision.config, code, compiler, decision.why)
            )
            done(each.name, f"{name} {dict(decision.config)} ({decision.why})")
    if not report.locked:
        reason = next(iter(report.refused.values()), "the workload names no problem")
        raise InvalidArgument(f"nothing was locked: {reason}")
    lock.write(path, report.locked, {"kernelcat": __version__})
    return report
