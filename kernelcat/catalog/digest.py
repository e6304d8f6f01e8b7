"""Digests of implementations: they cover what runs, not how the code is written.

A digest covers the definitions that the program builder and the device code reach, without
comments and layout; compiler options; and the launches (grid, block, shared memory, parameters,
workspaces) over a fixed sample of problems and configurations. Cost models, rankings, ``illegal``
and ``unpromising``, and names of files are not covered.

A measurement or a receipt is *stale* when its digest differs from today's digest and the record of
machine code (``kernelcat.verify.code_record``) does not list both digests as equal.

Computing a digest takes up to a second. So ``tuning_db/digests.json`` holds the digests of the
shipped files, and a digest is computed only where one of the files has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.catalog import discovery, launches, sample, source
from kernelcat.catalog.implementation import Implementation, Program, Source
from kernelcat.catalog.reach import Reach

FORMAT = 1
"""Part of every digest. Whoever changes the meaning of digests raises this number, and carries
receipts and measurements over."""

UNKNOWN = ""
"""The digest of an implementation that cannot be imported here; no other digest equals it."""

MACHINERY = ("catalog", "jit", "dtypes.py", "runtime/gpu.py")
"""Files and folders of the package that launches depend on, besides kernels and specifications."""

_CANNOT_SERVE = (ArithmeticError, LookupError, ValueError, StopIteration)
"""Exceptions that a program builder may raise for a configuration that cannot serve a problem."""


def digest(implementation: Implementation) -> str:
    """16 hex digits over everything that decides what ``implementation`` launches."""
    return digest_of(implementation.entry, implementation.language, implementation.variant)


@cache
def digest_of(entry: str, language: str, variant: str) -> str:
    """The digest of an implementation by name; imports no kernel while all files are as shipped.

    :data:`UNKNOWN` where there is no such implementation, or where its files have changed and its
    language is not installed.
    """
    name = f"{entry}/{language}/{variant}"
    shipped = _table()
    if name in shipped["digests"] and shipped["machinery"] == _machinery():
        shipped_digest, numbers = shipped["digests"][name]
        files = list(shipped["files"].items())
        if all(_content_hash(files[n][0]) == files[n][1] for n in numbers):
            return str(shipped_digest)
    try:
        return compute(discovery.implementation(entry, language, variant))
    except (LookupError, ImportError):
        return UNKNOWN


def compute(implementation: Implementation) -> str:
    """The digest of the sources as they are now: 16 hex digits. Takes up to a second."""
    return _digest(implementation, list(_programs(implementation)))


def _digest(implementation: Implementation, programs: list[Program | None]) -> str:
    builder = Reach()
    builder.add(implementation.program)
    launched = [program and launches.values(program) for program in programs]
    kernels = sorted({source.text() for source in _sources(programs)})
    parts = [FORMAT, implementation.language, list[Any](builder.text()), kernels, launched]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _sources(programs: list[Program | None]) -> list[Source]:
    """One source of each file or module: the code of its kernels is the same text."""
    places: dict[str, Source] = {}
    for program in programs:
        for step in program.steps if program else ():
            places.setdefault(step.source.place(), step.source)
    return list(places.values())


def _programs(implementation: Implementation) -> Iterator[Program | None]:
    """The programs of the sample; None where the builder cannot make one."""
    for problem, config, gpu in sample.cases(implementation, discovery.entry(implementation.entry)):
        try:
            yield implementation.program(problem, config, gpu)
        except _CANNOT_SERVE:
            yield None


# ---- the table of shipped digests --------------------------------------------------------------


def table_path() -> Path:
    """The file of shipped digests."""
    return paths.data("tuning_db") / "digests.json"


def table(implementations: Iterable[Implementation]) -> dict[str, Any]:
    """The content of ``tuning_db/digests.json`` for the sources as they are now.

    ``machinery``: hash of :data:`MACHINERY`; ``files``: file -> hash; ``digests``: implementation
    -> its digest, and the positions in ``files`` of the files that the digest depends on.
    """
    rows = {}
    for implementation in implementations:
        programs = list(_programs(implementation))
        file_names = sorted(set(_files(implementation, programs)))
        rows[implementation.name] = _digest(implementation, programs), file_names
    names = sorted({name for _, file_names in rows.values() for name in file_names})
    files = {name: _content_hash(name) for name in names}
    numbers = {name: number for number, name in enumerate(files)}
    digests = {name: [computed, [numbers[n] for n in file_names]]
               for name, (computed, file_names) in rows.items()}  # fmt: skip
    return {"machinery": _machinery(), "files": files, "digests": digests}


def _files(implementation: Implementation, programs: list[Program | None]) -> Iterator[str]:
    """Names of the catalog files that the digest depends on: ``kernels/cuda/gemm/wgmma.cu``."""
    builder = getattr(implementation.program, "func", implementation.program)
    files = set(source.python_files(builder.__module__))
    for kernel in _sources(programs):
        files.update(kernel.files())
    roots = {folder: paths.data(folder) for folder in source.FOLDERS}
    for path in files:
        for folder, root in roots.items():
            if path.is_relative_to(root):
                yield f"{folder}/{path.relative_to(root).as_posix()}"


@cache
def _table() -> dict[str, Any]:
    try:
        shipped: dict[str, Any] = json.loads(table_path().read_text())
        return shipped
    except FileNotFoundError:
        return {"machinery": "", "files": {}, "digests": {}}


@cache
def _content_hash(name: str) -> str:
    folder, _, rest = name.partition("/")
    return _sha(paths.data(folder) / rest)


@cache
def _machinery() -> str:
    root = Path(__file__).parent.parent
    files = [file for name in MACHINERY
             for file in (sorted((root / name).glob("*.py")) or [root / name])]  # fmt: skip
    return hashlib.sha256("".join(map(_sha, files)).encode()).hexdigest()[:16]


def _sha(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return UNKNOWN


def forget() -> None:
    """Clear all remembered digests and hashes: for programs that change source files."""
    for function in (digest_of, _table, _content_hash, _machinery):
        function.cache_clear()
