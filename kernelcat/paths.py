"""Folders of the catalog: in the installed package, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data(name: str) -> Path:
    """The folder ``name`` (``kernels``, ``reference`` or ``tuning_db``).

    In a wheel the folder is ``kernelcat/_data/NAME``; in a checkout it is beside the package.
    """
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
