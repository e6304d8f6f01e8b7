"""The journal: a file beside the database for measurements that could not be written to it."""

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
    """A file of JSON Lines. The caller holds the database's lock (:meth:`Location.lock`)."""

    path: Path

    def append(self, measurements: Iterable[Measurement]) -> None:
        """Write the rows and wait until they are on disk.

        Raises
        ------
        StoreError
            The journal cannot be written.
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
        """The rows in the journal; empty where there is no file.

        A line that a killed process left half-written is skipped, with a warning.

        Raises
        ------
        StoreError
            The file cannot be read, or holds a complete line that is not a measurement.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self.path} ({error.strerror})") from error
        rows, num_torn = [], 0
        for line in filter(None, lines):
            try:
                rows.append(Measurement.from_line(line))
            except InvalidArgument as error:
                if not str(error).startswith("not JSON"):
                    raise StoreError(f"{self.path} holds an invalid record: {error}; move the file "
                                     "away") from error  # fmt: skip
                num_torn += 1
        if num_torn:
            warnings.warn(f"{self.path}: {num_torn} half-written lines were dropped", stacklevel=2)
        return rows

    def remove(self) -> None:
        """Delete the file, if there is one."""
        self.path.unlink(missing_ok=True)

    @staticmethod
    def _is_torn(file: int) -> bool:
        """Whether the file ends in the middle of a line."""
        size = os.fstat(file).st_size
        return size > 0 and os.pread(file, 1, size - 1) != b"\n"
