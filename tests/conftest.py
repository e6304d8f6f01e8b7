"""Skips what needs a GPU where there is none, and keeps every test off the user's own files."""

from __future__ import annotations

import pytest

from kernelcat import driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if driver.count():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database, receipts and settings of the test's own; compiled kernels are shared."""
    folder = tmp_path_factory.mktemp("kernelcat")
    monkeypatch.setenv("KERNELCAT_DB", str(folder / "tuning.sqlite3"))
    monkeypatch.setenv("KERNELCAT_RECEIPTS", str(folder / "receipts"))
