"""Where the catalog's files lie: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data(name: str) -> Path:
    """The folder ``name`` (``kernels``, ``reference`` or ``tuning_db``).

    A wheel carries it as ``kernelcat/_data/NAME``; a checkout has it beside the package.
    """
    packed = _PACKAGE / "_data" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name
