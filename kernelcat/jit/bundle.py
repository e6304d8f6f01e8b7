"""Bundles: folders of compiled kernels that another machine runs without a compiler.

A bundle has a file for each artifact, as the cache writes them, under its
:func:`~kernelcat.jit.cache.portable_key`; ``bundle.json``, which says what was built; and
``SHA256SUMS``, which has the digest of every other file and can be checked by ``sha256sum -c``.

A bundle is read as a whole or not at all. Its kernels are code that runs in the user's process, and
digests inside a folder only show damage: whoever can replace the folder can replace them too. So
the digest of ``SHA256SUMS`` names a bundle, and :func:`prepare` takes the digest that is expected.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelcat.catalog import discovery
from kernelcat.errors import InvalidArgument
from kernelcat.jit import cache
from kernelcat.jit.artifact import Artifact

SUMS, CONTENTS = "SHA256SUMS", "bundle.json"
FORMAT = 2
"""Version of the layout of a bundle."""


def write(folder: Path, artifacts: Mapping[str, Artifact], facts: Mapping[str, Any]) -> str:
    """Write a bundle to ``folder``, which must be missing or empty; returns the bundle's digest.

    ``artifacts`` are by portable key. ``facts`` are JSON data about what was built; they become
    ``bundle.json``. Raises ``InvalidArgument`` where the folder has files, ``OSError`` where it
    cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InvalidArgument(f"{folder} is not empty: name a new folder")
    files = {name: cache.encode(artifact, name) for name, artifact in artifacts.items()}
    contents = {**facts, "format": FORMAT, "cache_format": cache.FORMAT, "kernels": len(files)}
    files[CONTENTS] = json.dumps(contents, indent=1, sort_keys=True).encode() + b"\n"
    sums = _sums(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        for name, data in {**files, SUMS: sums}.items():
            (temporary / name).write_bytes(data)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return hashlib.sha256(sums).hexdigest()


def prepare(folder: str | Path, sha256: str | None = None) -> None:
    """Load the kernels that ``kernelcat build -o FOLDER`` compiled; calls then compile nothing.

    Every file is read and checked once, here; later changes of the folder have no effect. Calls of
    kernels that the folder does not have are compiled as ever, or raise ``MissingDependency`` where
    the compiler is missing. Kernels of several folders add up. Processes that are forked later have
    them too; others call this function themselves.

    No compiler is needed: neither NVRTC and CUDA's headers, nor Triton, nor CuTe DSL. Of CuTe DSL
    the C runtime is needed, in the version that built the folder
    (``nvidia-cutlass-dsl-libs-cu13``).

    Parameters
    ----------
    folder : the folder
    sha256
        The digest that ``kernelcat build`` printed. Without it, damage is found, but not a folder
        that somebody replaced by another whole one.

    Raises
    ------
    InvalidArgument
        A file is missing, was added, or differs in a byte; the digest is another one; or another
        version of kernelcat built the folder. No kernel of the folder is used then.
    """
    folder = Path(folder)
    artifacts = read(folder, sha256)
    cache.prepared |= artifacts
    discovery.ahead |= {artifact.language for artifact in artifacts.values()}


def read(folder: Path, sha256: str | None = None) -> dict[str, Artifact]:
    """The artifacts of a bundle by portable key; raises ``InvalidArgument`` as :func:`prepare`."""
    try:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InvalidArgument(f"cannot read the bundle {folder} ({reason})") from error
    sums = files.pop(SUMS, b"")
    digest = hashlib.sha256(sums).hexdigest()
    if sha256 is not None and digest != sha256.lower():
        raise _refused(folder, f"it is {digest}, not {sha256}")
    if _sums(files) != sums:
        raise _refused(folder, _difference(_parsed(sums), files))
    contents = json.loads(files.pop(CONTENTS))
    if (contents["format"], contents["cache_format"]) != (FORMAT, cache.FORMAT):
        raise _refused(folder, "another version of kernelcat built it: build it again")
    return {name: cache.decode(data, name) for name, data in files.items()}


def _sums(files: Mapping[str, bytes]) -> bytes:
    """Lines in the format of sha256sum, sorted by name."""
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    return "".join(lines).encode()


def _parsed(sums: bytes) -> dict[str, str]:
    """File name -> digest, of the lines that have both."""
    pairs = (line.split("  ", 1) for line in sums.decode(errors="replace").splitlines())
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}


def _difference(listed: Mapping[str, str], files: Mapping[str, bytes]) -> str:
    """What is wrong with ``files``, which are not those that are ``listed`` by name and digest."""
    if not listed:
        return f"it has no {SUMS}: kernelcat build writes one"
    for name in sorted(listed.keys() | files.keys()):
        if name not in files:
            return f"{name} is missing"
        if name not in listed:
            return f"{name} is not listed in {SUMS}"
        if hashlib.sha256(files[name]).hexdigest() != listed[name]:
            return f"{name} is not as {SUMS} says"
    return f"{SUMS} is not as it was written"


def _refused(folder: Path, reason: str) -> InvalidArgument:
    return InvalidArgument(f"the bundle {folder} is refused: {reason}")
