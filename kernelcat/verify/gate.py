"""The correctness gate: an implementation against the entry's oracle, on poisoned memory.

Every buffer lies between guard bands, and each byte that must not be read (bands, gaps between
strided rows) is 0xFF: NaN in a float type, so that a read out of bounds shows in the result.
Outputs start as 0xFF too, so that an element nobody wrote shows. Afterwards inputs, gaps and
bands must be what they were: a write out of bounds is a wrong result, not only a crash. So must
those elements of an updated output that the oracle leaves alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log10
from typing import Any

import numpy as np

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import EXACT, Arrays, Entry, Problem, Tensor
from kernelcat.runtime.device import Bind, Device, Run

GUARD_BYTES = 4096
POISON = 0xFF
LARGE = 1 << 28
"""Elements above which a conversion is done in pieces."""


@dataclass(frozen=True)
class Verdict:
    """Whether a result was right.

    ``max_error``: largest ``|out - oracle|``, NaN if unknown. ``sqnr_db``: signal to quantization
    noise in dB, None where the entry knows no unquantized result or has no signal.
    """

    passed: bool
    max_error: float
    detail: str = ""
    sqnr_db: float | None = None

    def with_another(self, other: Verdict) -> Verdict:
        """Of two results that are right: the largest error, the least signal."""
        known = [v.sqnr_db for v in (self, other) if v.sqnr_db is not None]
        error = max(self.max_error, other.max_error)
        return Verdict(True, error, sqnr_db=min(known, default=None))


@dataclass(frozen=True)
class Buffer:
    """A tensor between guard bands. ``view`` is what kernels see; ``raw`` all of it, as bytes."""

    tensor: Tensor
    raw: Any
    view: Any
    used: Any

    @staticmethod
    def poisoned(tensor: Tensor, problem: Problem, xp: Any) -> Buffer:
        dtype = dtypes.STORAGE[tensor.dtype_of(problem)]
        size = np.dtype(dtype).itemsize
        span = tensor.span_of(problem) * size
        raw = xp.full(GUARD_BYTES + span + GUARD_BYTES, POISON, dtype="uint8")
        shape, strides = tensor.shape_of(problem), tensor.strides_of(problem)
        flat = raw[GUARD_BYTES : GUARD_BYTES + span].view(dtype)
        byte_strides = tuple(s * size for s in strides)
        view = xp.lib.stride_tricks.as_strided(flat, shape, byte_strides)
        return Buffer(tensor, raw, view, _used(raw, shape, byte_strides, size, xp))

    def poison(self) -> None:
        self.raw.fill(POISON)

    def outside_intact(self) -> bool:
        """Whether the bands, and the gaps between strided rows, still hold the poison."""
        outside = self.raw.size - self.view.size * self.view.dtype.itemsize
        if self.used is None:
            head, tail = self.raw[:GUARD_BYTES], self.raw[self.raw.size - GUARD_BYTES :]
            return bool((head == POISON).all()) and bool((tail == POISON).all())
        poisoned = int((self.raw == POISON).sum()) - int((self.used == POISON).sum())
        return poisoned == outside


def _used(raw: Any, shape: Sequence[int], strides: Sequence[int], size: int, xp: Any) -> Any:
    """A byte view of the tensor's own elements where there are gaps between them, else None."""
    packed = size * int(np.prod(shape))
    if raw.size == packed + 2 * GUARD_BYTES:
        return None
    body = raw[GUARD_BYTES : raw.size - GUARD_BYTES]
    return xp.lib.stride_tricks.as_strided(body, (*shape, size), (*strides, 1))


@dataclass
class Prepared:
    """Inputs, oracle and poisoned outputs of one problem and seed, shared by every candidate.

    ``pristine`` is what inputs and updated outputs held when they were drawn; ``kept`` tells of an
    updated output's elements which must stay as they were. ``exact`` are outputs of unquantized
    inputs, for an entry that has a signal to keep.
    """

    entry: Entry
    problem: Problem
    device: Device
    buffers: dict[str, Buffer]
    expected: Mapping[str, Any]
    pristine: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> Arrays:
        """Tensor name -> storage array; what ``device.load(...)``'s bind takes."""
        return {name: buffer.view for name, buffer in self.buffers.items()}

    def verify(self, bind: Bind, *, peer: bool = False) -> Verdict:
        """Run once on freshly poisoned outputs, updated ones as drawn, and judge the result."""
        return self.verify_run(bind(self.arrays), peer=peer)

    def verify_run(self, run: Run, *, peer: bool = False, copies: Sequence[Arrays] = ()) -> Verdict:
        """The same for something already bound to ``self.arrays`` (a captured graph).

        ``copies`` are further arrays that it is bound to, with the same inputs: of them outputs
        are judged.
        """
        outputs = self.entry.outputs
        for tensor in outputs:
            self.buffers[tensor.name].poison()
            for arrays in copies:
                bits = _bits(arrays[tensor.name])
                bits[...] = int.from_bytes(bytes([POISON]) * bits.dtype.itemsize, "little")
            if tensor.updated:
                for arrays in (self.arrays, *copies):
                    arrays[tensor.name][...] = self.pristine[tensor.name]
        run()
        self.device.synchronize()
        worst = self.judge(peer=peer)
        for number, arrays in enumerate(copies, 2):
            for tensor in outputs:
                if not worst.passed or (peer and tensor.optional_for_peers):
                    continue
                verdict = self._compare(tensor, arrays[tensor.name])
                if not verdict.passed:
                    return replace(verdict, detail=f"copy {number}: {verdict.detail}")
                worst = worst.with_another(verdict)
        return worst

    def judge(self, *, peer: bool = False) -> Verdict:
        """Judge what the buffers hold; of a ``peer`` without the outputs that it need not write."""
        worst = Verdict(True, 0.0)
        for tensor in self.entry.present(self.problem):
            buffer = self.buffers[tensor.name]
            if not buffer.outside_intact():
                return Verdict(False, float("nan"), f"wrote outside of {tensor.name}")
            if tensor in self.entry.inputs:
                if not _equal_bits(buffer.view, self.pristine[tensor.name]):
                    return Verdict(False, float("nan"), f"changed its input {tensor.name}")
                continue
            if peer and tensor.optional_for_peers:
                continue
            verdict = self._compare(tensor, buffer.view)
            if not verdict.passed:
                return verdict
            worst = worst.with_another(verdict)
        return worst

    def _compare(self, tensor: Tensor, out: Any) -> Verdict:
        expected = self.expected[tensor.name]
        tolerance = self.entry.tolerance_of(self.problem, tensor)
        if out.size == 0:
            return Verdict(True, 0.0)
        kept = self.kept.get(tensor.name, False)
        if tensor.updated:
            changed = int((kept & (_bits(out) != _bits(self.pristine[tensor.name]))).sum())
            if changed:
                detail = f"{tensor.name}: {changed} elements changed that must stay as they were"
                return Verdict(False, float("nan"), detail)
        if tolerance == EXACT:
            if _equal_bits(out, expected):
                return self._hear(tensor, out, 0.0)
            wrong = int((_bits(out) != _bits(expected)).sum())
            return Verdict(False, float("nan"), f"{tensor.name}: {wrong} of {out.size} differ")
        xp = self.device.xp
        error = dtypes.decode(out, tensor.dtype_of(self.problem))
        same = (error == expected) | kept
        with np.errstate(invalid="ignore"):  # the difference of infinities
            error -= expected
            xp.abs(error, out=error)
            error[same] = 0
            largest = float(error.max())
            error -= tolerance.relative * xp.abs(expected)
            right = same | (error <= tolerance.absolute)
        wrong = out.size - int(right.sum())
        if not wrong:
            return self._hear(tensor, out, largest)
        at = int((~right).argmax())
        where = tuple(int(i) for i in np.unravel_index(at, out.shape))
        return Verdict(
            False,
            largest,
            f"{tensor.name}: {wrong} of {out.size} elements off, first at {where}: "
            f"{float(dtypes.decode(out[where], tensor.dtype_of(self.problem))):.6g} "
            f"instead of {float(expected[where]):.6g}",
        )

    def _hear(self, tensor: Tensor, out: Any, max_error: float) -> Verdict:
        """The verdict on elements within the tolerance: whether together they keep the signal."""
        signal, exact = self.entry.signal, self.exact.get(tensor.name)
        if signal is None or exact is None:
            return Verdict(True, max_error)
        sqnr = sqnr_db(dtypes.decode(out, tensor.dtype_of(self.problem)), exact)
        least = signal.least(self.problem)
        if sqnr is None or least is None or sqnr >= least:
            return Verdict(True, max_error, sqnr_db=sqnr)
        detail = f"{tensor.name}: {sqnr:.2f} dB of signal to quantization noise, less than {least}"
        return Verdict(False, max_error, detail, sqnr)


def sqnr_db(found: Any, exact: Any) -> float | None:
    """``10 log10(sum exact^2 / sum (found - exact)^2)``; None of no signal and of no noise."""
    signal = float((exact * exact).sum(dtype="float64"))
    noise = found - exact
    noise = float((noise * noise).sum(dtype="float64"))
    return 10 * log10(signal / noise) if signal and noise else None


def _bits(array: Any) -> Any:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def _equal_bits(a: Any, b: Any) -> bool:
    return bool((_bits(a) == _bits(b)).all())


def prepare(entry: Entry, problem: Problem, device: Device, seed: int = 0) -> Prepared:
    """Draw inputs, compute the oracle and poison the rest.

    Memory: for a tensor of n bytes about 2n, and 4 bytes an element of output for the oracle (8
    where there is a signal to keep); an updated output takes one byte an element more.
    """
    values = drawn(entry, problem, device.xp, seed)
    buffers = _stored(entry, problem, device, values)
    views = {name: buffer.view for name, buffer in buffers.items()}
    if entry.tolerance_of(problem) != EXACT:
        views = {n: dtypes.decode(v, buffers[n].tensor.dtype_of(problem)) for n, v in views.items()}
    expected = entry.oracle(problem, views)
    exact = entry.signal.exact(problem, values) if entry.signal else {}
    pristine = {name: buffer.view.copy() for name, buffer in buffers.items()}
    kept = {t.name: _bits(expected[t.name]) == _bits(views[t.name]) for t in entry.updated}
    for tensor in entry.outputs:
        if not tensor.updated:
            buffers[tensor.name] = Buffer.poisoned(tensor, problem, device.xp)
    return Prepared(entry, problem, device, buffers, expected, pristine, kept, exact)


def inputs(entry: Entry, problem: Problem, device: Device, seed: int = 0) -> dict[str, Buffer]:
    """What is drawn of the problem with ``seed``, each tensor between its guard bands."""
    return _stored(entry, problem, device, drawn(entry, problem, device.xp, seed))


def _stored(entry: Entry, problem: Problem, device: Device, values: Arrays) -> dict[str, Buffer]:
    buffers = {}
    for tensor in entry.drawn:
        if tensor.present(problem):
            buffers[tensor.name] = Buffer.poisoned(tensor, problem, device.xp)
            _store(buffers[tensor.name].view, values[tensor.name], tensor.dtype_of(problem))
    return buffers


def drawn(entry: Entry, problem: Problem, xp: Any, seed: int = 0) -> dict[str, Any]:
    """The values that ``entry.make_inputs`` draws with ``seed``, by NumPy or CuPy (``xp``)."""
    random = xp.random.default_rng(seed)

    def normal(shape: tuple[int, ...]) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    return entry.make_inputs(problem, normal)


def _store(view: Any, values: Any, dtype: str) -> None:
    """Encode ``values`` into ``view``; by halves while large, since encoding needs temporaries."""
    if view.size <= LARGE:
        view[...] = dtypes.encode(values, dtype)
        return
    axis = int(np.argmax(view.shape))
    half = view.shape[axis] // 2
    for part in (slice(None, half), slice(half, None)):
        at = (slice(None),) * axis + (part,)
        _store(view[at], values[at], dtype)


def allocate(
    entry: Entry, problem: Problem, device: Device, seed: int = 0, copies: int = 1
) -> list[Arrays]:
    """``copies`` independent sets of arrays for timing: drawn once, and other outputs poisoned."""
    sets: list[Arrays] = []
    originals = inputs(entry, problem, device, seed)
    for _ in range(copies):
        arrays = {}
        for tensor in entry.present(problem):
            buffer = Buffer.poisoned(tensor, problem, device.xp)
            if tensor.name in originals:
                buffer.view[...] = originals[tensor.name].view
            arrays[tensor.name] = buffer.view
        sets.append(arrays)
    return sets


def check(
    implementation: Implementation,
    problem: Problem,
    config: Config,
    device: Device,
    seeds: Sequence[int] = (0, 1),
) -> Verdict:
    """One configuration on several seeds; the first failure, or the pass with the largest error."""
    entry = catalog.entry(implementation.entry)
    bind = device.load(implementation, problem, config)
    worst = Verdict(True, 0.0)
    for seed in seeds:
        verdict = prepare(entry, problem, device, seed).verify(bind)
        if not verdict.passed:
            return verdict
        worst = worst.with_another(verdict)
    return worst
