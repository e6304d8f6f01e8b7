"""Folders of the catalog: in the installed package or a checkout, and those of users' entries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kernelcat.errors import InvalidArgument

VARIABLE = "KERNELCAT_ENTRIES"
"""Names folders with entries of one's own, joined as in ``PATH``."""

_PACKAGE = Path(__file__).resolve().parent
_own = [Path(name).resolve() for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def data(name: str) -> Path:
    """The folder ``name`` (``kernels``, ``reference`` or ``tuning_db``).

    In a wheel the folder is ``kernelcat/_data/NAME``; in a checkout it is beside the package.
    """
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def folders(name: str) -> tuple[Path, ...]:
    """The catalog's folder ``kernels`` or ``reference``, then those of users' entries."""
    return data(name), *(root / name for root in _own)


def add(root: str | os.PathLike[str]) -> None:
    """Add a folder of users' entries, behind the others; see ``kernelcat.catalog.add_entries``.

    Raises
    ------
    InvalidArgument
        ``root`` has no folder ``reference``.
    """
    path = Path(root).resolve()
    if not (path / "reference").is_dir():
        raise InvalidArgument(f"{path} has no folder reference with specifications")
    if path in _own:
        return
    _own.append(path)
    for name in ("kernels", "reference"):
        package = sys.modules.get(f"kernelcat.{name}")
        if package is not None:
            package.__path__.append(str(path / name))
