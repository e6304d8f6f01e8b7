"""The correctness gate: an implementation against the entry's oracle, on poisoned memory.

Every buffer lies between guard bands. Each byte that must not be read (guard bands, gaps between
strided rows) is 0xFF, which is NaN in a float type, so that a read out of bounds shows in the
result. Outputs start as 0xFF too, so that an element that was never written shows. Afterwards
inputs, gaps and guard bands must be unchanged: a write out of bounds is a wrong result. Those
elements of an updated output that the oracle leaves alone must be unchanged as well.
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
"""Bytes of the guard band before a tensor, and of the one after it."""
POISON = 0xFF
"""Every byte of poisoned memory."""
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


@dataclass(frozen=True)
class Buffer:
    """A tensor between guard bands.

    Attributes
    ----------
    raw : guard band, tensor, guard band as bytes, shape (2 * GUARD_BYTES + size of the tensor)
    view : the array for kernels, with the tensor's shape, strides and storage dtype
    used : bytes of the tensor's elements, shape (*shape, itemsize); None without gaps
    """

    tensor: Tensor
    raw: Any
    view: Any
    used: Any

    @staticmethod
    def poisoned(tensor: Tensor, problem: Problem, xp: Any) -> Buffer:
        """A buffer for ``tensor`` in which every byte is poison; ``xp`` is NumPy or CuPy."""
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
        """Overwrite the tensor and its guard bands with poison."""
        self.raw.fill(POISON)

    def outside_intact(self) -> bool:
        """Whether the guard bands and the gaps between strided rows still hold the poison."""
        outside = self.raw.size - self.view.size * self.view.dtype.itemsize
        if self.used is None:
            head, tail = self.raw[:GUARD_BYTES], self.raw[self.raw.size - GUARD_BYTES :]
            return bool((head == POISON).all()) and bool((tail == POISON).all())
        poisoned = int((self.raw == POISON).sum()) - int((self.used == POISON).sum())
        return poisoned == outside


def _used(raw: Any, shape: Sequence[int], strides: Sequence[int], size: int, xp: Any) -> Any:
    """The bytes of the elements, shape (*shape, size), where gaps lie between them; else None.

    ``shape`` and ``strides`` (in bytes) are the tensor's, ``size`` is the bytes of an element.
    """
    packed = size * int(np.prod(shape))
    if raw.size == packed + 2 * GUARD_BYTES:
        return None
    body = raw[GUARD_BYTES : raw.size - GUARD_BYTES]
    return xp.lib.stride_tricks.as_strided(body, (*shape, size), (*strides, 1))


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

    @property
    def arrays(self) -> Arrays:
        """Tensor name -> storage array, as the bind that ``device.load(...)`` returns takes it."""
        return {name: buffer.view for name, buffer in self.buffers.items()}

    def verify(self, bind: Bind, *, peer: bool = False) -> Verdict:
        """Bind ``arrays``, run once and judge the result; see :meth:`verify_run`."""
        return self.verify_run(bind(self.arrays), peer=peer)

    def verify_run(self, run: Run, *, peer: bool = False, copies: Sequence[Arrays] = ()) -> Verdict:
        """Poison the outputs, restore updated ones, call ``run`` once and judge the result.

        ``run`` is bound to :attr:`arrays` (a captured graph, for example), and to each of
        ``copies``: further sets of arrays with equal inputs, whose outputs are judged too.
        ``peer`` leaves out the outputs that a peer need not write.
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
        """Judge what the buffers hold; ``peer`` leaves out outputs that a peer need not write."""
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
        """The verdict on ``out``, the result for the output ``tensor``, of the tensor's shape."""
        expected = self.expected[tensor.name]
        tolerance = self.entry.tolerance_of(self.problem, tensor)
        if out.size == 0:
            return Verdict(True, 0.0)
        must_stay = self.kept.get(tensor.name, False)
        if tensor.updated:
            changes = int((must_stay & (_bits(out) != _bits(self.pristine[tensor.name]))).sum())
            if changes:
                detail = f"{tensor.name}: {changes} elements changed that must stay as they were"
                return Verdict(False, float("nan"), detail)
        if tolerance == EXACT:
            if _equal_bits(out, expected):
                return self._judge_signal(tensor, out, 0.0)
            num_wrong = int((_bits(out) != _bits(expected)).sum())
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


def _bits(array: Any) -> Any:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def _equal_bits(a: Any, b: Any) -> bool:
    return bool((_bits(a) == _bits(b)).all())


def prepare(entry: Entry, problem: Problem, device: Device, seed: int = 0) -> Prepared:
    """Draw inputs, compute the oracle and poison the rest.

    Memory: about 2n bytes for a tensor of n bytes; for each element of an output 4 bytes more for
    the oracle (8 if the entry has a signal), and 1 byte more if the output is updated.
    """
    values = drawn(entry, problem, device.xp, seed)
    buffers = _stored(entry, problem, device, values)
    views = {name: buffer.view for name, buffer in buffers.items()}
    if entry.tolerance_of(problem) != EXACT:
        views = decoded(entry, problem, views)
    expected = entry.oracle(problem, views)
    exact = entry.signal.exact(problem, values) if entry.signal else {}
    pristine = {name: buffer.view.copy() for name, buffer in buffers.items()}
    kept = {t.name: _bits(expected[t.name]) == _bits(views[t.name]) for t in entry.updated}
    for tensor in entry.outputs:
        if not tensor.updated:
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
    seeds: Sequence[int] = (0, 1),
) -> Verdict:
    """Check one configuration with several seeds.

    Returns the first failure; else a pass with the largest error and the lowest ``sqnr_db``.
    """
    entry = catalog.entry(implementation.entry)
    bind = device.load(implementation, problem, config)
    worst = Verdict(True, 0.0)
    for seed in seeds:
        verdict = prepare(entry, problem, device, seed).verify(bind)
        if not verdict.passed:
            return verdict
        worst = worst.with_another(verdict)
    return worst
