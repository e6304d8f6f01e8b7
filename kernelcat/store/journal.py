"""Measurements that could not be written to the database wait in a file beside it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store.measurement import Measurement


@dataclass(frozen=True)
class Journal:
    """JSON Lines, appended and synced to disk. The caller holds the database's lock."""

    path: Path

    def append(self, measurements: Iterable[Measurement]) -> None:
        """Write the rows and wait until they are on disk.

        Raises
        ------
        StoreError
            When not even the journal can be written.
        """
        text = "".join(f"{row.line()}\n" for row in measurements).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                if self._is_torn(file.fileno()):
                    text = b"\n" + text
                while text:
                    text = text[file.write(text) or 0 :]
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"cannot write {self.path} ({error.strerror}): measurements are not being kept; "
                "free some space, or name a database elsewhere in KERNELCAT_DB"
            ) from error

    def read(self) -> list[Measurement]:
        """The rows waiting. A line that a killed process left half-written is skipped."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self.path} ({error.strerror})") from error
        found, torn = [], 0
        for line in filter(None, lines):
            try:
                found.append(Measurement.from_line(line))
            except InvalidArgument as error:
                if not str(error).startswith("not JSON"):
                    raise StoreError(f"{self.path} holds a record that is refused: {error}; move "
                                     "the file away") from error  # fmt: skip
                torn += 1
        if torn:
            warnings.warn(f"{self.path}: {torn} half-written lines were dropped", stacklevel=2)
        return found

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    @staticmethod
    def _is_torn(file: int) -> bool:
        """Whether the file ends in the middle of a line."""
        size = os.fstat(file).st_size
        return size > 0 and os.pread(file, 1, size - 1) != b"\n"
