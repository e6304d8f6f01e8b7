"""What the site shows: the database's rows, and the records that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelcat import catalog
from kernelcat.report import predictions
from kernelcat.report.board import load, load_past
from kernelcat.report.site.build import pages
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import Measurement, audits, model_results, plausibility, random_races
from kernelcat.store import shipped as shipped_rows
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
            if self.gpu in (None, result.gpu) and not self.entry and _is_shown(result)
        ]
        tunes = [each for each in audits.shipped(self.entry) if self.gpu in (None, each.gpu)]
        return pages(
            rows, counted, compiled, checked, random, past, runs, self._predicted, tunes,
            doubt=plausibility.doubt,
        )  # fmt: skip

    @cached_property
    def _predicted(self) -> list[predictions.Audit]:
        """The cost models, judged by the shipped races."""
        rows = shipped_rows()
        skus = sorted({row.gpu for row in rows if row.gpu in SKUS and self.gpu in (None, row.gpu)})
        names = [self.entry] if self.entry else catalog.names()
        entries = [catalog.entry(name) for name in names]
        races = predictions.races_of
        return [
            predictions.audit(entry, sku, races(entry, sku, rows))
            for sku in skus
            for entry in entries
        ]

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


def _is_shown(result: model_results.ModelResult) -> bool:
    """Whether a run has times that the page of the engine shows."""
    parts = ("decoding", "prefill", "loads", "fetch", "interference")
    return any(result.measured.get(part) for part in parts)
