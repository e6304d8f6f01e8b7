"""The digest of an implementation: of what runs, not of how it is written.

It covers the definitions that its program builder and its device code reach, without comments and
layout; compiler options; and what is launched (grid, block, shared memory, parameters, workspaces)
over a fixed sample of problems and configurations. Cost models, rankings and what says which
configurations serve are outside, and so are the names of files.

A measurement or a receipt is *stale* when its digest is not today's and none that the record of
machine code calls equal to it (``kernelcat.verify.machine_code``).

To compute a digest takes up to a second. So ``tuning_db/digests.json`` has those of the files as
they are shipped, and a digest is computed where a file is another one.
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
from kernelcat.catalog.implementation import Implementation, Program
from kernelcat.catalog.reach import Reach

FORMAT = 1
"""Goes into every digest: raise it when the meaning of one changes, and carry what is measured."""

UNKNOWN = ""
"""The digest of what cannot be imported here; equal to none."""

MACHINERY = ("catalog", "jit", "dtypes.py", "runtime/gpu.py")
"""What of the package, besides the catalog's own files, launches depend on."""

_CANNOT_SERVE = (ArithmeticError, LookupError, ValueError, StopIteration)
"""What a program builder raises of configurations that cannot serve a problem."""


def digest(implementation: Implementation) -> str:
    """16 hex digits over everything that decides what ``implementation`` launches."""
    return digest_of(implementation.entry, implementation.language, implementation.variant)


@cache
def digest_of(entry: str, language: str, variant: str) -> str:
    """The same by name; imports no kernel where all files are as they were shipped.

    :data:`UNKNOWN` where there is no such implementation, or where its files have changed and its
    language is not installed.
    """
    name = f"{entry}/{language}/{variant}"
    shipped = _table()
    if name in shipped["digests"] and shipped["machinery"] == _machinery():
        found, numbers = shipped["digests"][name]
        files = list(shipped["files"].items())
        if all(_content_hash(files[n][0]) == files[n][1] for n in numbers):
            return str(found)
    try:
        return compute(discovery.implementation(entry, language, variant))
    except (LookupError, ImportError):
        return UNKNOWN


def compute(implementation: Implementation) -> str:
    """The digest, from the sources as they are; takes up to a second."""
    builder = Reach()
    builder.add(implementation.program)
    text, launched = list[Any](builder.text()), []
    kernels: dict[str, None] = {}
    for program in _programs(implementation):
        launched.append(program and launches.values(program))
        for step in program.steps if program else ():
            kernels[step.source.text()] = None
    parts = [FORMAT, implementation.language, text, sorted(kernels), launched]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _programs(implementation: Implementation) -> Iterator[Program | None]:
    """The programs of the sample; None where a configuration cannot serve."""
    for problem, config, gpu in sample.cases(implementation, discovery.entry(implementation.entry)):
        try:
            yield implementation.program(problem, config, gpu)
        except _CANNOT_SERVE:
            yield None


# ---- the table of shipped digests --------------------------------------------------------------


def table_path() -> Path:
    return paths.data("tuning_db") / "digests.json"


def table(implementations: Iterable[Implementation]) -> dict[str, Any]:
    """Digests of ``implementations`` as they are now, with the hashes of the files they are of."""
    of = {i.name: (compute(i), sorted(set(_files(i)))) for i in implementations}
    files = {name: _content_hash(name) for name in sorted({n for _, ns in of.values() for n in ns})}
    numbers = {name: number for number, name in enumerate(files)}
    digests = {name: [found, [numbers[n] for n in ns]] for name, (found, ns) in of.items()}
    return {"machinery": _machinery(), "files": files, "digests": digests}


def _files(implementation: Implementation) -> Iterator[str]:
    """Names of the catalog's files that the digest depends on: ``kernels/cuda/gemm/wgmma.cu``."""
    builder = getattr(implementation.program, "func", implementation.program)
    paths_ = set(source.python_files(builder.__module__))
    for program in _programs(implementation):
        for step in program.steps if program else ():
            paths_.update(step.source.files())
    roots = {folder: paths.data(folder) for folder in source.FOLDERS}
    for path in paths_:
        for folder, root in roots.items():
            if path.is_relative_to(root):
                yield f"{folder}/{path.relative_to(root).as_posix()}"


@cache
def _table() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(table_path().read_text())
        return found
    except FileNotFoundError:
        return {"machinery": "", "files": {}, "digests": {}}


@cache
def _content_hash(name: str) -> str:
    folder, _, rest = name.partition("/")
    return _sha(paths.data(folder) / rest)


@cache
def _machinery() -> str:
    root = Path(__file__).parent.parent
    found = [file for name in MACHINERY
             for file in (sorted((root / name).glob("*.py")) or [root / name])]  # fmt: skip
    return hashlib.sha256("".join(map(_sha, found)).encode()).hexdigest()[:16]


def _sha(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return UNKNOWN


def forget() -> None:
    """Read all files again: for programs that change them."""
    for function in (digest_of, _table, _content_hash, _machinery):
        function.cache_clear()
