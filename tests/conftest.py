"""Skips what needs a GPU where there is none, and keeps every test off the user's own files."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator

import pytest

from kernelcat import driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if driver.count():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@atexit.register
def end_with_pytests_last_line() -> None:
    """Triton's compiler lists leaked references after it, once Python is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A database and receipts of the test's own; compiled kernels are shared.

    A command that turned Triton's interpreter on does so for its own test only.
    """
    folder = tmp_path_factory.mktemp("kernelcat")
    monkeypatch.setenv("KERNELCAT_DB", str(folder / "tuning.sqlite3"))
    monkeypatch.setenv("KERNELCAT_RECEIPTS", str(folder / "receipts"))
    yield
    os.environ.pop("TRITON_INTERPRET", None)
