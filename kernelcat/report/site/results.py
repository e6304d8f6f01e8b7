"""What the site shows: the database's rows, and the records that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelcat.report.board import load, load_past
from kernelcat.report.site.build import pages
from kernelcat.store import Measurement, model_results, plausibility, random_races
from kernelcat.verify import code_record, profiles, receipts


@dataclass(frozen=True)
class Results:
    """The results of ``gpu`` (SKU) and ``entry``, where they are given.

    ``url`` names the database, which is read from a private copy.
    """

    gpu: str | None = None
    entry: str | None = None
    url: str | None = None

    def rows(self) -> list[Measurement]:
        """The rows of today's database and the shipped ones; raises ``StoreError``."""
        return load(self.gpu, self.entry, None, self.url, as_copy=True)

    def pages(self, rows: list[Measurement]) -> dict[str, str]:
        """File name -> content of every page for ``rows``."""
        compiled, checked, counted = self._records
        random = [r for r in random_races.shipped(self.entry) if self.gpu in (None, r.gpu)]
        past = load_past(self.gpu, self.entry, self.url, as_copy=True)
        runs = [
            result
            for result in model_results.read(model_results.shipped_folder())
            if self.gpu in (None, result.gpu) and not self.entry and result.measured["decoding"]
        ]
        return pages(rows, counted, compiled, checked, random, past, runs, doubt=plausibility.doubt)

    @cached_property
    def _records(
        self,
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]], list[profiles.Profile]]:
        """Entry and SKU of recorded machine code and of receipts that hold; profiles."""
        records = code_record.read(code_record.shipped_folder())
        compiled = {(record.implementation.split("/")[0], record.gpu) for record in records}
        counted = profiles.read(profiles.shipped_folder())
        return (
            {pair for pair in compiled if self._is_asked(*pair)},
            {pair for pair in receipts.checked() if self._is_asked(*pair)},
            [profile for profile in counted if self._is_asked(profile.entry, profile.gpu)],
        )

    def _is_asked(self, entry: str, gpu: str) -> bool:
        return self.entry in (None, entry) and self.gpu in (None, gpu)
