"""The correctness gate: an implementation against the entry's oracle, on poisoned memory.

Every buffer lies between guard bands. Each byte that must not be read (guard bands, gaps between
strided rows) is 0xFF, which is NaN in a float type, so that a read out of bounds shows in the
result. Outputs start as 0xFF too, so that an element that was never written shows. Afterwards
inputs, gaps and guard bands must be unchanged: a write out of bounds is a wrong result. Those
elements of an updated output that the oracle leaves alone must be unchanged as well.

All memory is written again before every run: what one kernel broke is no fault of the next. A
second run has guard bands of another pattern, which a kernel that writes 0xFF changes.
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
from kernelcat.verify.buffer import BANDS, GUARD_BYTES, PATTERNS, POISON, Buffer, bits, wide
from kernelcat.verify.seeds import draw_seeds

__all__ = [
    "BANDS",
    "GUARD_BYTES",
    "PATTERNS",
    "POISON",
    "Buffer",
    "Prepared",
    "Verdict",
    "allocate",
    "check",
    "drawn",
    "inputs",
    "prepare",
    "sqnr_db",
]

LARGE = 1 << 28
"""Elements above which an array is encoded in parts."""


@dataclass(frozen=True)
class Verdict:
    """Whether a result was right.

    Attributes
    ----------
    max_error : largest ``|out - oracle|``; NaN where unknown
    detail : what was wrong; empty where the result was right
    sqnr_db : signal to quantization noise in dB; None where the entry has no unquantized result to
        compare with, or no noise or no signal
    """

    passed: bool
    max_error: float
    detail: str = ""
    sqnr_db: float | None = None

    def with_another(self, other: Verdict) -> Verdict:
        """Two right results as one verdict: their largest error, and their lowest ``sqnr_db``."""
        sqnrs = [v.sqnr_db for v in (self, other) if v.sqnr_db is not None]
        error = max(self.max_error, other.max_error)
        return Verdict(True, error, sqnr_db=min(sqnrs, default=None))


@dataclass
class Prepared:
    """Inputs, oracle and poisoned outputs of one problem and seed, shared by every candidate.

    Attributes
    ----------
    buffers : tensor name -> buffer
    expected : output name -> the oracle's result, an array of the output's shape
    pristine : name -> values of an input or updated output before any kernel ran, same shape
    kept : name of an updated output -> which elements must not change, same shape, booleans
    exact : output name -> result for unquantized inputs, same shape; empty where the entry has no
        :class:`~kernelcat.catalog.spec.Signal`
    """

    entry: Entry
    problem: Problem
    device: Device
    buffers: dict[str, Buffer]
    expected: Mapping[str, Any]
    pristine: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] = field(default_factory=dict)
    poison: int = POISON  # what the guard bands hold now

    @property
    def arrays(self) -> Arrays:
        """Tensor name -> storage array, as the bind that ``device.load(...)`` returns takes it."""
        return {name: buffer.view for name, buffer in self.buffers.items()}

    @property
    def accumulates(self) -> bool:
        """Whether a second run on the same memory gives another result."""
        return any(tensor.accumulated for tensor in self.entry.present(self.problem))

    def copy(self) -> Prepared:
        """A copy with equal inputs and oracle in memory of its own, and with poisoned outputs."""
        buffers = {name: Buffer.poisoned(buffer.tensor, self.problem, self.device.xp)
                   for name, buffer in self.buffers.items()}  # fmt: skip
        copy = replace(self, buffers=buffers)
        copy.reset()
        return copy

    def on(self, other: Prepared) -> Prepared:
        """These inputs and this oracle for the memory of ``other``; :meth:`reset` writes it."""
        return replace(self, buffers=other.buffers)

    def reset(self, poison: int = POISON) -> None:
        """Write inputs and updated outputs again; fill other outputs and all bands with poison."""
        self.poison = poison
        for name, buffer in self.buffers.items():
            buffer.refill(poison, self.pristine.get(name))

    def verify(self, bind: Bind, *, peer: bool = False, poison: int = POISON) -> Verdict:
        """Bind ``arrays``, run once and judge the result; see :meth:`verify_run`."""
        return self.verify_run(bind(self.arrays), peer=peer, poison=poison)

    def verify_run(
        self,
        run: Run,
        *,
        peer: bool = False,
        copies: Sequence[Prepared] = (),
        poison: int = POISON,
    ) -> Verdict:
        """Reset all memory, call ``run`` once and judge the result.

        ``run`` is bound to :attr:`arrays` (a captured graph, for example), and to the arrays of
        each of ``copies``, which are judged too. ``peer`` leaves out the outputs that a peer need
        not write. The guard bands and the outputs are filled with the byte ``poison``.
        """
        for prepared in (self, *copies):
            prepared.reset(poison)
        self.device.synchronize()
        run()
        self.device.synchronize()
        worst = self.judge(peer=peer)
        for number, prepared in enumerate(copies, 2):
            if not worst.passed:
                return worst
            verdict = prepared.judge(peer=peer)
            if not verdict.passed:
                return replace(verdict, detail=f"copy {number}: {verdict.detail}")
            worst = worst.with_another(verdict)
        return worst

    def judge(self, *, peer: bool = False) -> Verdict:
        """Judge what the buffers hold; ``peer`` leaves out outputs that a peer need not write.

        Outputs come first: a kernel that works on after its end has the least time.
        """
        worst = Verdict(True, 0.0)
        present = list(self.entry.present(self.problem))
        inputs = [tensor for tensor in present if tensor in self.entry.inputs]
        for tensor in (t for t in present if t not in inputs):
            if peer and tensor.optional_for_peers:
                continue
            verdict = self._compare(tensor, self.buffers[tensor.name].view)
            if not verdict.passed:
                return verdict
            worst = worst.with_another(verdict)
        for tensor in present:
            if not self.buffers[tensor.name].outside_intact(self.poison):
                return Verdict(False, float("nan"), f"wrote outside of {tensor.name}")
        for tensor in inputs:
            if not _equal_bits(self.buffers[tensor.name].view, self.pristine[tensor.name]):
                return Verdict(False, float("nan"), f"changed its input {tensor.name}")
        return worst

    def unlike(self, copies: Sequence[Prepared]) -> list[int]:
        """Which of ``copies`` hold other bits than this memory, guard bands included.

        The rest get the verdict that this memory gets. One comparison a buffer, and one wait for
        all of them, cost a tenth of judging each copy.
        """
        is_other = self.device.xp.zeros((len(copies), len(self.buffers)), bool)
        for number, copy in enumerate(copies):
            for column, (name, buffer) in enumerate(self.buffers.items()):
                changed = wide(buffer.raw) != wide(copy.buffers[name].raw)
                changed.any(out=is_other[number, column, ...])
        return [int(number) for number in is_other.any(axis=1).nonzero()[0]]

    def _compare(self, tensor: Tensor, out: Any) -> Verdict:
        """The verdict on ``out``, the result for the output ``tensor``, of the tensor's shape."""
        expected = self.expected[tensor.name]
        tolerance = self.entry.tolerance_of(self.problem, tensor)
        if out.size == 0:
            return Verdict(True, 0.0)
        must_stay = self.kept.get(tensor.name, False)
        if tensor.updated:
            changes = int((must_stay & (bits(out) != bits(self.pristine[tensor.name]))).sum())
            if changes:
                detail = f"{tensor.name}: {changes} elements changed that must stay as they were"
                return Verdict(False, float("nan"), detail)
        if tolerance == EXACT:
            if _equal_bits(out, expected):
                return self._judge_signal(tensor, out, 0.0)
            num_wrong = int((bits(out) != bits(expected)).sum())
            return Verdict(False, float("nan"), f"{tensor.name}: {num_wrong} of {out.size} differ")
        xp = self.device.xp
        error = dtypes.decode(out, tensor.dtype_of(self.problem))
        is_equal = (error == expected) | must_stay  # also equal infinities
        with np.errstate(invalid="ignore"):  # the difference of infinities
            error -= expected
            xp.abs(error, out=error)
            error[is_equal] = 0
            largest = float(error.max())
            error -= tolerance.relative * xp.abs(expected)
            is_right = is_equal | (error <= tolerance.absolute)
        num_wrong = out.size - int(is_right.sum())
        if not num_wrong:
            return self._judge_signal(tensor, out, largest)
        first = int((~is_right).argmax())
        where = tuple(int(i) for i in np.unravel_index(first, out.shape))
        return Verdict(
            False,
            largest,
            f"{tensor.name}: {num_wrong} of {out.size} elements off, first at {where}: "
            f"{float(dtypes.decode(out[where], tensor.dtype_of(self.problem))):.6g} "
            f"instead of {float(expected[where]):.6g}",
        )

    def _judge_signal(self, tensor: Tensor, out: Any, max_error: float) -> Verdict:
        """The verdict on a result whose elements are all within the tolerance.

        The result passes if its signal to quantization noise is high enough.
        """
        signal, exact = self.entry.signal, self.exact.get(tensor.name)
        if signal is None or exact is None:
            return Verdict(True, max_error)
        sqnr = sqnr_db(dtypes.decode(out, tensor.dtype_of(self.problem)), exact)
        min_sqnr = signal.least(self.problem)
        if sqnr is None or min_sqnr is None or sqnr >= min_sqnr:
            return Verdict(True, max_error, sqnr_db=sqnr)
        detail = (
            f"{tensor.name}: {sqnr:.2f} dB of signal to quantization noise, less than {min_sqnr}"
        )
        return Verdict(False, max_error, detail, sqnr)


def sqnr_db(result: Any, exact: Any) -> float | None:
    """Signal to quantization noise in dB: ``10 log10(sum exact^2 / sum (result - exact)^2)``.

    ``result`` and ``exact`` are float arrays of one shape. None without signal or without noise.
    """
    signal = float((exact * exact).sum(dtype="float64"))
    error = result - exact
    noise = float((error * error).sum(dtype="float64"))
    return 10 * log10(signal / noise) if signal and noise else None


def _equal_bits(a: Any, b: Any) -> bool:
    """Whether two arrays of one shape and storage dtype have the same bits."""
    in_words = a.flags.c_contiguous and b.flags.c_contiguous
    first, second = (wide(a), wide(b)) if in_words else (bits(a), bits(b))
    return bool((first == second).all())


def prepare(entry: Entry, problem: Problem, device: Device, seed: int = 0) -> Prepared:
    """Draw inputs, compute the oracle and poison the rest.

    Memory: about 2n bytes for a tensor of n bytes; for each element of an output 4 bytes more for
    the oracle (8 if the entry has a signal), and 1 byte more if the output is updated.
    """
    values = drawn(entry, problem, device.xp, seed)
    buffers = _stored(entry, problem, device, values)
    # An oracle may return an input itself, and the buffers of inputs change during a race.
    pristine = {name: buffer.view.copy() for name, buffer in buffers.items()}
    is_exact = entry.tolerance_of(problem) == EXACT
    views = pristine if is_exact else decoded(entry, problem, pristine)
    expected = entry.oracle(problem, views)
    exact = entry.signal.exact(problem, values) if entry.signal else {}
    updated = [tensor.name for tensor in entry.updated if tensor.present(problem)]
    kept = {name: bits(expected[name]) == bits(views[name]) for name in updated}
    for tensor in entry.outputs:
        if tensor.present(problem) and not tensor.updated:
            buffers[tensor.name] = Buffer.poisoned(tensor, problem, device.xp)
    return Prepared(entry, problem, device, buffers, expected, pristine, kept, exact)


def decoded(entry: Entry, problem: Problem, stored: Arrays) -> dict[str, Any]:
    """Values of drawn tensors by name: float32, but storage arrays for tensors ``as_stored``."""
    values = {}
    for tensor in entry.drawn:
        if tensor.present(problem):
            array = stored[tensor.name]
            dtype = tensor.dtype_of(problem)
            values[tensor.name] = array if tensor.as_stored else dtypes.decode(array, dtype)
    return values


def inputs(entry: Entry, problem: Problem, device: Device, seed: int = 0) -> dict[str, Buffer]:
    """The tensors that are drawn with ``seed``: name -> buffer with its values."""
    return _stored(entry, problem, device, drawn(entry, problem, device.xp, seed))


def _stored(entry: Entry, problem: Problem, device: Device, values: Arrays) -> dict[str, Buffer]:
    buffers = {}
    for tensor in entry.drawn:
        if tensor.present(problem):
            buffers[tensor.name] = Buffer.poisoned(tensor, problem, device.xp)
            view, drawn_values = buffers[tensor.name].view, values[tensor.name]
            if tensor.as_stored:
                view[...] = drawn_values
            else:
                _store(view, drawn_values, tensor.dtype_of(problem))
    return buffers


def drawn(entry: Entry, problem: Problem, xp: Any, seed: int = 0) -> dict[str, Any]:
    """The values that ``entry.make_inputs`` draws with ``seed``: name -> array of its shape.

    ``xp`` is NumPy or CuPy.
    """
    random = xp.random.default_rng(seed)

    def normal(shape: tuple[int, ...]) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    return entry.make_inputs(problem, normal)


def _store(view: Any, values: Any, dtype: str) -> None:
    """Encode ``values`` into ``view`` (one shape), in parts of at most :data:`LARGE` elements.

    Encoding needs temporaries, which would not fit beside a large array.
    """
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
    """``copies`` independent sets of arrays for timing: tensor name -> array.

    All sets have the same drawn values; outputs that are not updated hold poison.
    """
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
    seeds: Sequence[int] | None = None,
) -> Verdict:
    """Check one configuration with several seeds, and with both patterns of guard bands in turn.

    Returns the first failure, which names its seed; else a pass with the largest error and the
    lowest ``sqnr_db``. None draws two seeds.
    """
    entry = catalog.entry(implementation.entry)
    bind = device.load(implementation, problem, config)
    worst = Verdict(True, 0.0)
    for number, seed in enumerate(draw_seeds(2) if seeds is None else seeds):
        poison = BANDS[number % len(BANDS)]
        verdict = prepare(entry, problem, device, seed).verify(bind, poison=poison)
        if not verdict.passed:
            return replace(verdict, detail=f"seed {seed}: {verdict.detail}")
        worst = worst.with_another(verdict)
    return worst
