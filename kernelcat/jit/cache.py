"""The cache of compiled kernels: looks in memory, then on disk, and else runs the compiler.

One file holds one artifact: a SHA-256 digest of the rest, a line of JSON, and the code. A file is
written under a temporary name, flushed to disk and renamed. So processes that compile one source at
the same time need no lock, and nobody reads an incomplete file.

Artifacts are code that runs in the user's processes. So a file is read only if it belongs to the
user or to root and nobody else may write to it, and if it names the key that it is found under.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import time
import warnings
from functools import cache
from pathlib import Path

from kernelcat.bounded import Bounded
from kernelcat.catalog.implementation import Source
from kernelcat.errors import MissingDependency
from kernelcat.jit.artifact import Artifact

FORMAT = 3
"""Part of every key. Whoever changes the file format or the meaning of metadata raises it."""

COMPILER_VARIABLES = re.compile(
    "(TRITON|PTXAS|NVPTX|NVCC|NVRTC|LLVM|MLIR|CUTE_DSL|CUTLASS)_.*"
    "|DISABLE_(LLVM|PTXAS)_OPT|USE_IR_LOC|ALLOW_LHS_TMEM_LAYOUT_CONVERSION"
).fullmatch
"""Environment variables that may change machine code. One too many costs a compilation."""
OTHER_VARIABLES = {
    "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "TRITON_PRINT_AUTOTUNING",
    "CUTE_DSL_CACHE_DIR",
}  # fmt: skip
"""Variables with such names that change no machine code."""

_IS_KEY = re.compile("[0-9a-f]{64}").fullmatch

_STARTED = time.time()
"""When this module was imported, in seconds: before any module of kernels."""

_memory = Bounded[str, Artifact](256)
"""The newest artifacts; an older one is read from the disk again."""

prepared: dict[str, Artifact] = {}
"""Artifacts that were compiled ahead, by :func:`portable_key` (:mod:`kernelcat.jit.bundle`)."""

_warned: set[Path] = set()


def build(source: Source, arch: str) -> Artifact:
    """The artifact of ``source`` for ``arch`` (``sm_90a``), from the cache or the compiler.

    Raises
    ------
    CompileError
        The compiler refused the source.
    MissingDependency
        The compiler is not installed.
    """
    try:
        return find(source, arch) or _compile(source, arch)
    except MissingDependency as error:
        if not prepared:
            raise
        raise MissingDependency(
            f"no prepared folder has {source.place()} for {arch}, and to compile it: {error}"
        ) from error


def _compile(source: Source, arch: str) -> Artifact:
    """The artifact of ``source``, compiled and stored in the cache."""
    name = key(source, arch)
    data = encode(source.compile(arch), name)
    if not _is_edited(source):
        _write(folder() / name, data)
    # Decoded again, so that metadata has the same types as from the disk.
    artifact = _memory[name] = decode(data, name)
    return artifact


def _is_edited(source: Source) -> bool:
    """Whether a file of ``source`` was written while this process ran.

    The key then describes the new file, but a module that was imported before still has the old
    code: an artifact of the old code must not be found under the new key.
    """
    return any(path.stat().st_mtime > _STARTED for path in source.files())


def find(source: Source, arch: str) -> Artifact | None:
    """The prepared or cached artifact of ``source`` for ``arch``, or None. Never compiles."""
    ahead = prepared.get(portable_key(source, arch)) if prepared else None
    if ahead is not None:
        return ahead
    name = key(source, arch)
    artifact = _memory.get(name) or _read(folder() / name)
    if artifact is not None:
        _memory[name] = artifact
    return artifact


def key(source: Source, arch: str) -> str:
    """The artifact's file name: a hex digest of everything that decides the machine code."""
    parts = [FORMAT, source.language, source.digest(), arch, source.toolchain(), _variables()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def portable_key(source: Source, arch: str) -> str:
    """A hex digest like :func:`key`, without what only the compiling machine has.

    Versions of compilers and environment variables are left out, because the machine that runs the
    artifact may have no compiler. The host functions of CuTe need the C runtime of their version,
    so the version of the runtime counts.
    """
    parts = [FORMAT, source.language, source.digest(), arch, source.runtime()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _variables() -> dict[str, str]:
    """The environment variables that may change machine code, sorted by name."""
    chosen = (name for name in os.environ if COMPILER_VARIABLES(name))
    return {name: os.environ[name] for name in sorted(chosen) if name not in OTHER_VARIABLES}


def folder() -> Path:
    """``$KERNELCAT_CACHE``, or ``kernelcat/artifacts`` in the user's cache folder."""
    chosen = os.environ.get("KERNELCAT_CACHE")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("kernelcat", appauthor=False)) / "artifacts"


def sizes() -> dict[Path, int]:
    """The files of artifacts in :func:`folder`, each with its bytes; no files of another name."""
    if not folder().is_dir():
        return {}
    files = (path for path in folder().iterdir() if _IS_KEY(path.name) and path.is_file())
    return {path: path.stat().st_size for path in files}


def clear() -> int:
    """Delete all artifacts, in memory too; returns how many files were deleted."""
    _memory.clear()
    files = sizes()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None.

    The version is read from names of folders: importing ``importlib.metadata`` takes 50 ms.
    """
    normalized = re.sub(r"[-_.]+", "_", distribution).lower()
    return next(filter(None, (_versions(path).get(normalized) for path in sys.path)), None)


@cache
def _versions(path: str) -> dict[str, str]:
    """Normalized name -> version of the distributions in the folder ``path``."""
    try:
        names = os.listdir(path or ".")  # noqa: PTH208 (five times as fast as Path.iterdir)
    except OSError:
        return {}
    stems = (name.removesuffix(".dist-info") for name in names if name.endswith(".dist-info"))
    pairs = (stem.rpartition("-")[::2] for stem in stems)
    return {re.sub(r"[-_.]+", "_", name).lower(): version for name, version in pairs}


def encode(artifact: Artifact, name: str) -> bytes:
    """The content of the file ``name``, the key of an artifact."""
    cubin_is_code = artifact.cubin == artifact.code
    header = {
        "key": name,
        "language": artifact.language,
        "arch": artifact.arch,
        "kernel": artifact.kernel,
        "metadata": dict(artifact.metadata),
        "code_bytes": len(artifact.code),
        "cubin_is_code": cubin_is_code,
    }
    body = json.dumps(header, sort_keys=True).encode() + b"\n" + artifact.code
    body += b"" if cubin_is_code else artifact.cubin
    return hashlib.sha256(body).digest() + body


def decode(data: bytes, name: str) -> Artifact:
    """The artifact in the content of the file ``name``.

    Raises ``ValueError`` where the content is damaged or belongs to another key.
    """
    digest, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("the checksum does not match")
    line, _, payload = body.partition(b"\n")
    header = json.loads(line)
    if header.pop("key") != name:
        raise ValueError("its content belongs to another key")
    code = payload[: header.pop("code_bytes")]
    cubin = code if header.pop("cubin_is_code") else payload[len(code) :]
    return Artifact(code=code, cubin=cubin, **header)


def _read(path: Path) -> Artifact | None:
    try:
        with path.open("rb") as file:
            _check_owner(os.fstat(file.fileno()))
            return decode(file.read(), path.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not isinstance(error, NotADirectoryError):
            warnings.warn(
                f"unreadable cached kernel {path}: {error}; compiling it again",
                RuntimeWarning,
                stacklevel=4,
            )
        return None


def _check_owner(status: os.stat_result) -> None:
    """Raise ``ValueError`` for a file that another user owns or may write to."""
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"user {status.st_uid} owns it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})")


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically; where that fails, warn and continue without a cached file."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(path.parent, error)


def _warn_once(directory: Path, error: OSError) -> None:
    if directory not in _warned:
        _warned.add(directory)
        warnings.warn(
            f"compiled kernels are not cached: cannot write to {directory} ({error.strerror}); "
            "set KERNELCAT_CACHE to a writable folder",
            RuntimeWarning,
            stacklevel=4,
        )
