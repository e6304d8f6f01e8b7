"""A machine for tests of which row a call chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_rows import Machine

import kernelcat
from kernelcat.call import adapters, operator
from kernelcat.runtime import gpu, launcher


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(launcher, "load", machine.load)
    monkeypatch.setattr(operator, "_gpu", lambda index: gpu.SKUS["h200"])
    monkeypatch.setattr(adapters, "_warned", set())
    kernelcat.reload()
    yield machine
    kernelcat.reload()
