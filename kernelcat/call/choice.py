"""The choice of an implementation and a configuration for a problem on a GPU, with the reason.

Where a lock is in use and has the problem, only the kernel of the lock serves. Otherwise the order
is: the exact problem, measured on this SKU; the least time that the entry's calibrated model of
this SKU predicts, for its portfolio and for what was measured in the problem's bucket; a problem of
the same bucket, measured on this SKU; either of the measured ones on a sibling SKU (one with the
same architecture); where this SKU has no model of the entry, the least time by a sibling's; a
prediction for this SKU, or for a sibling SKU; the winners of the nearest problems measured on this
SKU, or on a sibling SKU; the implementations' defaults, highest rank first. An entry's model comes
after the winners of the nearest problems, or does not serve at all, where its judgement says so
(``kernelcat calibrate``). Every offer is checked again. Passed over are rows that cannot be true,
and configurations that are not of the space, whose result was found wrong, or that do not compile;
the next offer serves. An unverified implementation serves only by name, or where no other serves. A
configuration that is not worth a try (``unpromising``) serves only if it was measured for this very
problem, by name, or where no other serves.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kernelcat import catalog
from kernelcat.call.calibrated import Prediction, predictions
from kernelcat.call.known import Groups, groups
from kernelcat.call.locking import NO_RULING, Ruling
from kernelcat.catalog.implementation import LANGUAGES, Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName, Unsupported
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import calibration
from kernelcat.store.calibration import Calibrated
from kernelcat.verify import receipts
from kernelcat.verify.code_record import Case, is_todays

if TYPE_CHECKING:
    from kernelcat.store import Choice, Measurement

FIXED_WHY = ("forced", "locked")
"""Reasons without an alternative: the caller or a lock says which configuration serves."""

NEAREST, BORROWED_NEAREST = "nearest", "borrowed nearest"
"""Reasons of winners of another problem: on this SKU, and on a sibling SKU."""

MEASURED_WHY = ("exact", "bucket", *FIXED_WHY)
"""Reasons that are no miss: the bucket was measured, or the configuration is fixed."""

Attempt = tuple[str, str]
"""Name of an implementation, and canonical JSON of a configuration."""


@dataclass(frozen=True)
class Pin:
    """Language, variant and configuration that the caller of ``get`` asks for; None for any."""

    language: str | None = None
    variant: str | None = None
    config: Config | None = None

    def check(self, entry: Entry) -> None:
        """Raise ``InvalidArgument`` or ``UnknownName`` unless what is pinned exists.

        ``MissingDependency`` where the compiler of the pinned language is not installed.
        """
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
            chosen = catalog.implementation(entry.name, str(self.language), self.variant)
            reason = None if self.config is None else chosen.why_not_in_space(self.config)
            if reason is not None:
                raise InvalidArgument(f"{chosen.name}: {reason}")

    @property
    def key(self) -> str:
        """Canonical JSON of the keywords of ``get``; the empty string where nothing is pinned."""
        config = None if self.config is None else dict(self.config)
        fields = {"language": self.language, "variant": self.variant, "config": config}
        pinned = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(pinned, sort_keys=True, separators=(",", ":")) if pinned else ""

    def allows(self, language: str, variant: str) -> bool:
        """Whether this pin leaves ``variant`` in ``language`` to choose."""
        return self.language in (None, language) and self.variant in (None, variant)


@dataclass(frozen=True)
class Considered:
    """An implementation that the choice considered.

    ``rejected`` is the reason why the implementation does not serve, or None. ``is_fault`` is
    whether the row or the configuration is at fault: whoever calls should learn of it. ``why`` is
    as in :class:`Decision`.
    """

    name: str
    why: str
    config: Config | None
    rejected: str | None
    is_fault: bool = False


@dataclass(frozen=True)
class Decision:
    """The implementation and the configuration that serve a problem.

    ``why`` is ``exact``, ``bucket``, ``calibrated``, ``borrowed``, ``borrowed model``,
    ``predicted``, ``borrowed prediction``, ``nearest``, ``borrowed nearest``, ``default``,
    ``forced`` or ``locked``; ``evidence`` is the row of the database behind the decision, if there
    is one. ``predictions`` are those of the calibrated model, the fastest first, where it was
    asked. ``refuted`` is when a fixed configuration was found wrong, or None. ``ruling`` is what
    the lock in use says.
    """

    implementation: Implementation
    config: Config
    why: str
    evidence: Choice | None = None
    considered: tuple[Considered, ...] = ()
    refuted: str | None = None
    ruling: Ruling = NO_RULING
    predictions: tuple[Prediction, ...] = ()

    @cached_property
    def faults(self) -> list[Considered]:
        """The offers that were passed over because the row or the configuration is at fault."""
        return [candidate for candidate in self.considered if candidate.is_fault]

    @property
    def missed(self) -> bool:
        """Whether nobody has measured this problem or another of its bucket on this SKU.

        False for a configuration that the caller or a lock fixes.
        """
        return self.why not in MEASURED_WHY


@dataclass
class _Offer:
    """A proposal that may turn out not to serve; without ``config`` the default is meant.

    ``predicted`` is whether its time was compared with those of other offers: it needs no further
    check whether it is worth a try.
    """

    why: str
    language: str
    variant: str
    config: Config | None = None
    evidence: Choice | None = None
    predicted: bool = False


@dataclass
class _Search:
    """A search for what serves ``problem``, with all implementations considered so far.

    ``is_lent`` is whether ``model`` is that of a sibling SKU.
    """

    entry: Entry
    problem: Problem
    gpu: Gpu
    pin: Pin
    missing: Mapping[str, str]
    failed: Mapping[Attempt, str]
    refuted: Sequence[Measurement]
    ruling: Ruling = NO_RULING
    model: Calibrated | None = None
    is_lent: bool = False
    predictions: list[Prediction] | None = None
    considered: dict[tuple[str, str, Config | None, str | None], Considered] = field(
        default_factory=dict
    )

    def accept(self, offer: _Offer, verified: bool, promising: bool) -> Decision | None:
        """The decision for this offer, or None where it cannot serve; records the reason.

        With ``verified`` an unverified implementation does not serve. With ``promising`` neither
        does a configuration that is not worth a try, unless it is pinned or was measured for this
        problem.
        """
        config, implementation, fault = offer.config, None, None
        refuted, reason = None, self.missing.get(offer.language)
        if reason is None:
            try:
                implementation = catalog.implementation(
                    self.entry.name, offer.language, offer.variant
                )
            except (MissingDependency, UnknownName) as error:
                reason = str(error)
        if implementation is not None:
            promising = promising and offer.why not in ("exact", *FIXED_WHY) and not offer.predicted
            fault = self._fault(offer, implementation)
            if fault is None:
                config, reason = self._judge(implementation, config, verified, promising)
            if config is not None and fault is None and reason is None:
                refuted = self._refutation(offer, implementation, config)
                fault = self.failed.get((implementation.name, config.key)) or refuted
                fault = None if offer.why in FIXED_WHY else fault
        name = f"{self.entry.name}/{offer.language}/{offer.variant}"
        rejected = reason or fault
        candidate = Considered(name, offer.why, config, rejected, is_fault=fault is not None)
        self.considered[name, offer.why, offer.config, fault] = candidate
        if rejected is not None or implementation is None or config is None:
            return None
        considered = tuple(self.considered.values())
        return Decision(
            implementation, config, offer.why, offer.evidence, considered, refuted, self.ruling,
            tuple(self.predictions or ()),
        )  # fmt: skip

    def predicted(self, rule: str, mates: Sequence[Choice] = ()) -> Iterator[_Offer]:
        """What the calibrated model offers if its rule is ``rule``, the fastest first.

        ``mates`` are rows of the bucket, which it is compared with.
        """
        if self.model is None or self.model.rule != rule:
            return
        if self.predictions is None:
            self.predictions = predictions(
                self.model, self.problem, self.gpu, self.pin.allows, mates
            )
        for each in self.predictions:
            of_model = "borrowed model" if self.is_lent else "calibrated"
            why = "bucket" if each.evidence else of_model
            yield _Offer(
                why, each.language, each.variant, each.config, each.evidence, predicted=True
            )

    def _fault(self, offer: _Offer, implementation: Implementation) -> str | None:
        """Why the row of an offer cannot be true, or its configuration is not of the space."""
        doubt = None if offer.evidence is None else offer.evidence.doubt
        if doubt is not None or offer.config is None:
            return doubt
        return implementation.why_not_in_space(offer.config)

    def _refutation(
        self, offer: _Offer, implementation: Implementation, config: Config
    ) -> str | None:
        """When the code of today, or the code that the offer's row timed, was found wrong.

        The verdict counts for the problem of the call and for the problem of the row, on every GPU
        of this architecture.
        """
        problems = {self.problem.key: self.problem}
        if offer.evidence is not None:
            problems[offer.evidence.problem.key] = offer.evidence.problem
        timed = offer.evidence.source if offer.evidence and offer.config else None
        owner = (implementation.language, implementation.variant, config.key)
        for row in self.refuted:
            problem = problems.get(row.problem_key)
            is_same = (row.language, row.variant, row.config_key) == owner
            if problem is None or not is_same or not _are_siblings(row.gpu, self.gpu):
                continue
            case = Case(problem, config)
            if row.source == timed or is_todays(implementation.name, row.gpu, row.source, case):
                return f"found wrong on {row.gpu}, {row.created_at[:10]}: {row.detail}"
        return None

    def _judge(
        self, implementation: Implementation, config: Config | None, verified: bool, promising: bool
    ) -> tuple[Config | None, str | None]:
        """The configuration of an offer, and why it cannot serve, or None."""
        is_pinned = self.pin.variant is not None
        doubt = receipts.doubt(implementation) if verified and not is_pinned else None
        if doubt is not None:
            return config, f"unverified: {doubt}"
        if not implementation.serves(self.gpu.arch):
            archs = ", ".join(implementation.archs)
            return config, f"serves {archs}, not {self.gpu.arch}"
        config = config or implementation.default(self.problem, self.gpu)
        judge = implementation.why_not_try if promising else implementation.why_not
        return config, judge(config, self.problem, self.gpu)


def choose(
    entry: Entry,
    problem: Problem,
    gpu: Gpu,
    choices: Sequence[Choice] = (),
    pin: Pin | None = None,
    missing: Mapping[str, str] | None = None,
    failed: Mapping[Attempt, str] | None = None,
    refuted: Sequence[Measurement] = (),
    ruling: Ruling = NO_RULING,
    models: Mapping[str, Calibrated] | None = None,
) -> Decision:
    """The implementation and configuration that serve ``problem`` on ``gpu``.

    Parameters
    ----------
    choices : rows of the database for this entry, best first
    missing : language -> reason why that language cannot be used, found by an earlier attempt
    failed : configurations that could not be built -> reason, found by an earlier attempt
    refuted : rows whose results were found wrong
    ruling : what the lock in use says of the problem
    models : entry -> its calibrated model; None stands for those that are shipped, of this SKU or
        else of a sibling SKU

    Raises
    ------
    Unsupported
        No implementation serves; the message has the reason for each of them.
    """
    pin = pin or Pin()
    model = (calibration.models(gpu.sku) if models is None else models).get(entry.name)
    lent = calibration.lent(gpu.sku).get(entry.name) if model is None and models is None else None
    search = _Search(entry, problem, gpu, pin, missing or {}, failed or {}, refuted, ruling,
                     model or lent, is_lent=lent is not None)  # fmt: skip
    for verified, promising in itertools.product((True, False), repeat=2):
        for offer in _offers(search, choices):
            decision = search.accept(offer, verified, promising)
            if decision is not None:
                return decision
    raise Unsupported(_explain_failure(search))


def _offers(search: _Search, choices: Sequence[Choice]) -> Iterator[_Offer]:
    """Offers in the order of the module's docstring."""
    pin, locked = search.pin, search.ruling.locked
    if locked is not None:
        _, language, variant = locked.implementation.split("/")
        yield _Offer("locked", language, variant, locked.config)
        return
    if pin.config is not None:
        yield _Offer("forced", str(pin.language), str(pin.variant), pin.config)
        return
    known = groups(search.entry, choices)
    exact = _rows(search, "measured", known.exact(search.problem))
    yield from (_of_row("exact", choice) for choice in exact)
    mates = tuple(_rows(search, "measured", known.bucketmates(search.problem)))
    if not search.is_lent:
        yield from search.predicted(calibration.MODEL, mates)
    yield from (_of_row("bucket", choice) for choice in mates)
    both = [*known.exact(search.problem), *known.bucketmates(search.problem)]
    borrowed = _rows(search, "measured", both, sibling=True)
    yield from (_of_row("borrowed", choice) for choice in borrowed)
    if search.is_lent:
        yield from search.predicted(calibration.MODEL)
    for why, choice in _elsewhere(search, known, both):
        yield _of_row(why, choice)
        if why in (NEAREST, BORROWED_NEAREST):
            # where the configuration does not fit, the kernel's default may
            yield _Offer(why, choice.language, choice.variant, evidence=choice)
    yield from search.predicted(calibration.NEAREST_THEN_MODEL)
    defaults = [i for i in _installed(search) if pin.allows(i.language, i.variant)]
    for each in sorted(defaults, key=lambda i: (-i.rank, LANGUAGES.index(i.language))):
        yield _Offer("default", each.language, each.variant)


def _of_row(why: str, choice: Choice) -> _Offer:
    return _Offer(why, choice.language, choice.variant, choice.config, choice)


def _elsewhere(
    search: _Search, known: Groups, both: Sequence[Choice]
) -> Iterator[tuple[str, Choice]]:
    """Pairs of a reason and a row: a predicted one of ``both``, or a measured one of another
    problem. ``both`` are the rows of the problem and of its bucket."""
    yield from (("predicted", c) for c in _rows(search, "predicted", both))
    borrowed = _rows(search, "predicted", both, sibling=True)
    yield from (("borrowed prediction", c) for c in borrowed)
    nearest = known.nearest(search.problem)
    yield from ((NEAREST, c) for c in _rows(search, "measured", nearest))
    lent = _rows(search, "measured", nearest, sibling=True)
    yield from ((BORROWED_NEAREST, c) for c in lent)


def _rows(
    search: _Search, kind: str, among: Sequence[Choice], sibling: bool = False
) -> Iterator[Choice]:
    """The rows of one kind that are of this SKU, or with ``sibling`` of a sibling SKU."""
    for choice in among:
        is_here = choice.gpu == search.gpu.sku
        fits = not is_here and _are_siblings(choice.gpu, search.gpu) if sibling else is_here
        if choice.kind == kind and fits and search.pin.allows(choice.language, choice.variant):
            yield choice


def _are_siblings(sku: str, gpu: Gpu) -> bool:
    """Whether the SKU called ``sku`` has the architecture of ``gpu``."""
    if sku == gpu.sku:
        return True
    try:
        return gpus.find(sku).arch == gpu.arch
    except UnknownName:
        return False


def _installed(search: _Search) -> Iterator[Implementation]:
    """Implementations in languages whose compilers are installed; records the other languages."""
    for language in catalog.languages(search.entry.name):
        if search.pin.language not in (None, language):
            continue
        try:
            yield from catalog.in_language(search.entry.name, language)
        except MissingDependency as error:
            name = f"{search.entry.name}/{language}"
            unavailable = Considered(name, "default", None, str(error))
            search.considered[name, "default", None, None] = unavailable


def _explain_failure(search: _Search) -> str:
    """One line with the reason why each implementation does not serve."""
    reasons: dict[str, list[str]] = {}
    for candidate in search.considered.values():
        if candidate.why in ("default", *FIXED_WHY) and candidate.rejected:
            reasons.setdefault(candidate.rejected, []).append(candidate.name)
    details = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return (
        f"{search.entry.name}: nothing serves {search.problem} on {search.gpu.sku} "
        f"({search.gpu.arch}): {details or 'it has no kernels'}"
    )
