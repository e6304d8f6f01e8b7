"""From a problem and a GPU to an implementation and its configuration, and why that one.

Order: the exact problem measured on this SKU; a measured problem of the same bucket; the same of
a sibling SKU (one architecture); a prediction for this SKU; what won the nearest problems measured
on this SKU; the implementations' own defaults, highest rank first. Whatever is found is validated
again, so an old row never launches a kernel that cannot serve. An unverified implementation serves
only by name, or where nothing else does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import TYPE_CHECKING

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES, Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName, Unsupported
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import Gpu
from kernelcat.verify import receipts

if TYPE_CHECKING:
    from kernelcat.store import Choice

MEASURED_WHY = ("exact", "bucket", "forced")
"""Reasons that are not a miss: somebody measured this, or asked for it."""

NEAREST = 4.0
"""How far the nearest measured problem may be: the sum of its sizes' ratios, in powers of two."""


@dataclass(frozen=True)
class Pin:
    """What the caller of ``get`` insists on; None leaves it to the measurements."""

    language: str | None = None
    variant: str | None = None
    config: Config | None = None

    def check(self, entry: Entry) -> None:
        """Raise unless what is pinned exists."""
        if self.variant is not None and self.language is None:
            raise InvalidArgument(f"variant={self.variant!r} also needs language=")
        if self.config is not None and self.variant is None:
            raise InvalidArgument("config= also needs language= and variant=")
        if self.language is not None:
            variants = catalog.in_language(entry.name, self.language)
            if not variants:
                have = ", ".join(catalog.languages(entry.name)) or "none"
                raise UnknownName(f"{entry.name} has no {self.language} kernels; it has: {have}")
        if self.variant is not None:
            found = catalog.implementation(entry.name, str(self.language), self.variant)
            if self.config is not None and set(self.config) != set(found.space):
                raise InvalidArgument(
                    f"a config of {found.name} has exactly: {', '.join(found.space)}"
                )

    @property
    def key(self) -> str:
        """Canonical JSON of what is pinned, as ``get`` takes it; empty for nothing."""
        config = None if self.config is None else dict(self.config)
        given = {"language": self.language, "variant": self.variant, "config": config}
        given = {name: value for name, value in given.items() if value is not None}
        return json.dumps(given, sort_keys=True, separators=(",", ":")) if given else ""

    def allows(self, language: str, variant: str) -> bool:
        return self.language in (None, language) and self.variant in (None, variant)


@dataclass(frozen=True)
class Considered:
    """An implementation that was looked at: ``rejected`` says why it does not serve, or is None."""

    name: str
    why: str
    config: Config | None
    rejected: str | None


@dataclass(frozen=True)
class Decision:
    """What serves a problem.

    ``why`` is exact, bucket, borrowed, predicted, nearest, default or forced.
    """

    implementation: Implementation
    config: Config
    why: str
    evidence: Choice | None = None
    considered: tuple[Considered, ...] = ()

    @property
    def missed(self) -> bool:
        """Whether nobody has measured this problem, or one of its bucket, on this SKU."""
        return self.why not in MEASURED_WHY


@dataclass
class _Offer:
    why: str
    language: str
    variant: str
    config: Config | None = None
    evidence: Choice | None = None


@dataclass
class _Search:
    entry: Entry
    problem: Problem
    gpu: Gpu
    pin: Pin
    missing: Mapping[str, str]
    considered: dict[tuple[str, str, Config | None], Considered] = field(default_factory=dict)

    def accept(self, offer: _Offer, verified: bool) -> Decision | None:
        """The decision for this offer, or None after noting why it cannot serve."""
        config, implementation, reason = offer.config, None, self.missing.get(offer.language)
        if reason is None:
            try:
                implementation = catalog.implementation(
                    self.entry.name, offer.language, offer.variant
                )
            except (MissingDependency, UnknownName) as error:
                reason = str(error)
        if implementation is not None:
            config, reason = self._judge(implementation, config, verified)
        name = f"{self.entry.name}/{offer.language}/{offer.variant}"
        candidate = Considered(name, offer.why, config, reason)
        self.considered[name, offer.why, offer.config] = candidate
        if reason is not None or implementation is None or config is None:
            return None
        considered = tuple(self.considered.values())
        return Decision(implementation, config, offer.why, offer.evidence, considered)

    def _judge(
        self, implementation: Implementation, config: Config | None, verified: bool
    ) -> tuple[Config | None, str | None]:
        named = self.pin.variant is not None
        doubt = receipts.doubt(implementation) if verified and not named else None
        if doubt is not None:
            return config, f"unverified: {doubt}"
        if not implementation.serves(self.gpu.arch):
            archs = ", ".join(implementation.archs)
            return config, f"serves {archs}, not {self.gpu.arch}"
        config = config or implementation.default(self.problem, self.gpu)
        return config, implementation.why_not(config, self.problem, self.gpu)


def choose(
    entry: Entry,
    problem: Problem,
    gpu: Gpu,
    choices: Sequence[Choice] = (),
    pin: Pin | None = None,
    missing: Mapping[str, str] | None = None,
) -> Decision:
    """The implementation and configuration that serve ``problem`` on ``gpu``.

    Parameters
    ----------
    choices : rows of the database for this entry, best first
    missing : language -> why it cannot be used, beyond those that cannot be imported

    Raises
    ------
    Unsupported
        Nothing serves; says for each implementation why not.
    """
    pin = pin or Pin()
    search = _Search(entry, problem, gpu, pin, missing or {})
    for verified in (True, False):
        for offer in _offers(search, choices):
            decision = search.accept(offer, verified)
            if decision is not None:
                return decision
    raise Unsupported(_explain_failure(search))


def _offers(search: _Search, choices: Sequence[Choice]) -> Iterator[_Offer]:
    pin = search.pin
    if pin.config is not None:
        yield _Offer("forced", str(pin.language), str(pin.variant), pin.config)
        return
    for why, choice in _known(search, choices):
        yield _Offer(why, choice.language, choice.variant, choice.config, choice)
        if why == "nearest":  # its configuration may not fit, and its kernel be right all the same
            yield _Offer(why, choice.language, choice.variant, evidence=choice)
    defaults = [i for i in _installed(search) if pin.allows(i.language, i.variant)]
    for best in sorted(defaults, key=lambda i: (-i.rank, LANGUAGES.index(i.language))):
        yield _Offer("default", best.language, best.variant)


def _known(search: _Search, choices: Sequence[Choice]) -> Iterator[tuple[str, Choice]]:
    """Rows of the database that may serve, most trustworthy first."""
    entry, problem, gpu = search.entry, search.problem, search.gpu
    bucket = entry.bucket(problem)
    axes = set(entry.axis_names)  # rows of an older specification have others
    allowed = [
        choice
        for choice in choices
        if search.pin.allows(choice.language, choice.variant)
        and choice.problem.values.keys() == axes
    ]
    exact = [c for c in allowed if c.problem == problem]
    near = [c for c in allowed if c.problem != problem and entry.bucket(c.problem) == bucket]
    near.sort(key=lambda choice: _distance(entry, problem, choice.problem))

    def rows(kind: str, among: list[Choice], sibling: bool = False) -> Iterator[Choice]:
        for choice in among:
            here = choice.gpu == gpu.sku
            wanted = not here and _siblings(choice.gpu, gpu) if sibling else here
            if choice.kind == kind and wanted:
                yield choice

    yield from (("exact", c) for c in rows("measured", exact))
    yield from (("bucket", c) for c in rows("measured", near))
    yield from (("borrowed", c) for c in rows("measured", exact + near, sibling=True))
    yield from (("predicted", c) for c in rows("predicted", exact + near))
    major = entry.major_choices(problem)
    alike = [c for c in allowed if entry.major_choices(c.problem) == major]
    reached = [(_distance(entry, problem, c.problem), c) for c in alike]
    far = sorted((pair for pair in reached if pair[0] <= NEAREST), key=lambda pair: pair[0])
    yield from (("nearest", c) for c in rows("measured", [c for _, c in far]))


def _siblings(sku: str, gpu: Gpu) -> bool:
    try:
        return gpus.find(sku).arch == gpu.arch
    except UnknownName:
        return False


def _distance(entry: Entry, first: Problem, second: Problem) -> float:
    """How far apart two problems' sizes are: the sum of their ratios' logarithms."""
    sizes = [axis.name for axis in entry.axes if not axis.values]
    return sum(abs(log2((first[name] + 1) / (second[name] + 1))) for name in sizes)


def _installed(search: _Search) -> Iterator[Implementation]:
    for language in catalog.languages(search.entry.name):
        if search.pin.language not in (None, language):
            continue
        try:
            yield from catalog.in_language(search.entry.name, language)
        except MissingDependency as error:
            name = f"{search.entry.name}/{language}"
            search.considered[name, "default", None] = Considered(name, "default", None, str(error))


def _explain_failure(search: _Search) -> str:
    """Why nothing serves, and so what would: one line."""
    reasons: dict[str, list[str]] = {}
    for candidate in search.considered.values():
        if candidate.why in ("default", "forced") and candidate.rejected:
            reasons.setdefault(candidate.rejected, []).append(candidate.name)
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return (
        f"{search.entry.name}: nothing serves {search.problem} on {search.gpu.sku} "
        f"({search.gpu.arch}): {told or 'it has no kernels'}"
    )
