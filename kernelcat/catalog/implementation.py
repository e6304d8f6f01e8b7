"""Implementations: a configuration space, and the program that each configuration stands for.

A kernel file exports ``IMPLEMENTATIONS``, a tuple of :class:`Implementation`. Building, checking,
fuzzing, tuning, dispatch and receipts work on implementations of every language in the same way.
"""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernelcat.bounded import Bounded
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, Unsupported, short

if TYPE_CHECKING:
    from kernelcat.jit.artifact import Artifact
    from kernelcat.runtime.gpu import Gpu

ConfigValue = int | str | bool
LANGUAGES = ("cuda", "triton", "cute")
NAIVE = "naive"
"""The variant that each ladder begins with: it serves every problem, and is slow."""

CACHE_LINE = 128
"""Bytes."""


class Config(Mapping[str, ConfigValue]):
    """One choice of every tuning parameter: a frozen, hashable mapping with canonical JSON."""

    __slots__ = ("_hash", "_key", "_values")

    def __init__(self, values: Mapping[str, ConfigValue] | None = None, /, **more: ConfigValue):
        self._key: str | None = None
        self._values = dict(sorted({**(values or {}), **more}.items()))
        try:
            self._hash = hash(tuple(self._values.items()))
        except TypeError:
            raise InvalidArgument(
                f"config {short(self._values)} has a value that is neither a number nor a name"
            ) from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if type(other) is Config:
            return self._values == other._values
        return isinstance(other, Mapping) and self._values == dict(other)

    @property
    def key(self) -> str:
        """Canonical JSON: the text the store compares by."""
        if self._key is None:
            self._key = json.dumps(self._values, sort_keys=True, separators=(",", ":"))
        return self._key

    def __reduce__(self) -> tuple[type[Config], tuple[dict[str, ConfigValue]]]:
        return Config, (self._values,)  # not _hash: the hash of a str differs between processes

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"


class Source(Protocol):
    """The input of a compiler, for one kernel; one class per language in ``kernelcat.jit``."""

    language: str

    def place(self) -> str:
        """Where the code stands; sources of one place have the same :meth:`text`."""
        ...

    def text(self) -> str:
        """The code without comments and layout, the same text for every instance of the code."""
        ...

    def files(self) -> list[Path]:
        """The files that :meth:`text` is read from."""
        ...

    def instance(self) -> list[Any]:
        """Constants, types and compiler options that set this instance of the code apart."""
        ...

    def digest(self) -> str:
        """Hex digest of everything but architecture and toolchain that decides the machine code."""
        ...

    def toolchain(self) -> str:
        """Name and version of the compiler, found without importing the compiler."""
        ...

    def runtime(self) -> str:
        """Package and version of what compiled code needs in order to be loaded; empty for none."""
        ...

    def compile(self, arch: str) -> Artifact:
        """Compile for ``arch`` (``sm_90a``); raises ``CompileError`` or ``MissingDependency``."""
        ...


@dataclass(frozen=True)
class Pointer:
    """The address of a tensor of the entry or of a workspace; null for an absent tensor."""

    tensor: str


@dataclass(frozen=True)
class Int32:
    """A 32-bit integer, passed by value. A larger one raises ``Unsupported``: it would wrap."""

    value: int

    def __post_init__(self) -> None:
        if not -(1 << 31) <= self.value < 1 << 31:
            raise Unsupported(f"{self.value} does not fit into a parameter of 32 bits")


@dataclass(frozen=True)
class Int64:
    """A 64-bit integer, passed by value."""

    value: int


@dataclass(frozen=True)
class Float32:
    """A 32-bit float, passed by value."""

    value: float


@dataclass(frozen=True)
class Rank(Int32):
    """The number of the rank that launches; it is filled in when the program is loaded."""

    value: int = 0


@dataclass(frozen=True)
class Window(Int64):
    """The address of a window: memory of one rank that all ranks write to (``kernelcat.ranks``).

    The window is that of the rank ``shift`` after the one that launches, counted around; the
    address is the one at which the launching rank maps it, filled in when the program is loaded. It
    is null for a ``shift`` of as many ranks as there are, or more.
    """

    value: int = 0
    shift: int = 0


@dataclass(frozen=True)
class MappedPointer(Pointer):
    """The address of a tensor of another rank, which the launching rank maps (``Tensor.mapped``).

    ``shift`` counts ranks as in :class:`Window`. The address is null for a ``shift`` of as many
    ranks as there are, or more.
    """

    shift: int = 0

    @property
    def name(self) -> str:
        """The name under which a group binds the tensor: ``k_cache@1``."""
        return f"{self.tensor}@{self.shift}"


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map over a tensor, passed by value (``__grid_constant__``).

    ``shape`` and ``box`` are in elements, innermost dimension first. ``strides`` are in bytes, from
    the second-innermost dimension outwards: the innermost dimension is contiguous. ``swizzle`` is
    the swizzle span in bytes (0, 32, 64 or 128). ``l2_promotion`` is the number of bytes that a
    miss brings into L2 (0, 64, 128 or 256); None stands for the default of :attr:`promoted_bytes`.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int | None = None

    @property
    def promoted_bytes(self) -> int:
        """``l2_promotion``; by default 256 where every row begins at a cache line, else 128.

        Where rows begin inside a cache line, every row of a box straddles two lines, and a
        promotion to 256 bytes would load data that nobody needs.
        """
        if self.l2_promotion is not None:
            return self.l2_promotion
        return 256 if all(stride % CACHE_LINE == 0 for stride in self.strides) else 128


Param = Pointer | Int32 | Int64 | Float32 | TensorMap


@dataclass(frozen=True)
class Step:
    """One kernel launch. ``params`` are in the kernel's order, ``grid`` counts thread blocks.

    ``block`` is the number of threads of a thread block and ``shared_bytes`` its dynamic shared
    memory. Both stay 0 for Triton, where the artifact's metadata holds them. ``programmatic`` asks
    for programmatic dependent launch: this kernel may begin before the previous kernel of the
    stream ends, and waits for that kernel by ``griddepcontrol.wait``. ``max_carveout`` asks for SMs
    whose L1 is shared memory as far as possible, though this kernel needs little of it: an SM that
    is busy does not change its carveout, so a thread block of another stream that needs more shared
    memory would wait for all of this kernel's. That changes no result, and is no part of a digest.
    """

    source: Source
    grid: tuple[int, int, int]
    params: tuple[Param, ...]
    block: int = 0
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False
    max_carveout: bool = False


@dataclass(frozen=True)
class Program:
    """The launches of one configuration for one problem, in stream order.

    ``workspaces`` maps a name to a number of bytes of device memory, which are zero before the
    first run; a kernel that counts in a workspace must leave zeros behind. A workspace of 0 bytes
    is a null pointer. An empty problem has no steps.
    """

    steps: tuple[Step, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)

    def in_turn(self) -> Program:
        """This program without dependent launches: each waits for the end of the one before."""
        return replace(self, steps=tuple(replace(step, programmatic=False) for step in self.steps))


@dataclass(frozen=True)
class Implementation:
    """One variant of an entry in one language.

    Attributes
    ----------
    archs
        Architectures served: ``sm_90a`` is that architecture alone, ``sm_80+`` also all later ones.
    space
        Tuning parameter -> its values.
    illegal : ``(config, problem, gpu) -> reason or None``
        Why this configuration cannot serve this problem on this GPU. Pins, database records,
        fuzzing and search all obey this predicate.
    unpromising : ``(config, problem, gpu) -> reason or None``
        Why a legal configuration is not worth a try. The tuner's search and the default obey this
        predicate, and calls prefer what obeys it unless it was measured for the problem itself. It
        is called only with legal configurations.
    hopeless : ``config -> reason or None``
        The part of ``unpromising`` that depends on no problem. It saves time: a search asks for
        each configuration once, and not again for each problem.
    too_slow : ``(config, problem, gpu) -> reason or None``
        Why a configuration that is not ``unpromising`` is not worth a try beside the one with the
        least estimate. Searching that one may take many milliseconds: a call that compares
        predicted times does not ask.
    default : ``(problem, gpu) -> Config``
        A good configuration without any measurement. The default must be legal wherever any
        configuration of the space is legal. Left out, it is :class:`LeastEstimate`.
    program : ``(problem, config, gpu) -> Program``
        What to compile and launch. Also called in machines without a GPU: ``gpu`` may be a row of
        the table of SKUs.
    estimate : ``(problem, config, gpu) -> microseconds``
        The cost model, which ranks configurations where nothing can be measured.
    techniques
        Technique -> prefix of the SASS opcode that proves the technique (``{"wgmma": "HGMMA"}``).
    rank
        Position on the entry's ladder (naive 0). Without measurements the highest rank serves.
    unverified
        Why there is no receipt (``"needs a Blackwell GPU"``), or None.
    gluon
        Whether Triton code is in Triton's lower-level dialect Gluon, which has no interpreter.
    """

    entry: str
    language: str
    variant: str
    summary: str
    archs: tuple[str, ...]
    program: Callable[[Problem, Config, Gpu], Program]
    estimate: Callable[[Problem, Config, Gpu], float]
    space: Mapping[str, tuple[ConfigValue, ...]] = field(default_factory=dict)
    illegal: Callable[[Config, Problem, Gpu], str | None] = lambda config, problem, gpu: None
    unpromising: Callable[[Config, Problem, Gpu], str | None] = lambda config, problem, gpu: None
    hopeless: Callable[[Config], str | None] = lambda config: None
    too_slow: Callable[[Config, Problem, Gpu], str | None] = lambda config, problem, gpu: None
    default: Callable[[Problem, Gpu], Config] = field(default_factory=lambda: LeastEstimate())
    techniques: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    unverified: str | None = None
    gluon: bool = False

    def __post_init__(self) -> None:
        # dataclasses.replace copies the default of the original: bind a new one to this copy.
        if isinstance(self.default, LeastEstimate):
            object.__setattr__(self, "default", LeastEstimate(self, self.default.alike))

    @property
    def interpretable(self) -> bool:
        """Whether this implementation runs in Triton's interpreter, without a GPU."""
        return self.language == "triton" and not self.gluon

    @cached_property
    def name(self) -> str:
        """``gemm/cuda/wgmma``: the name in receipts, rows and on the command line."""
        return f"{self.entry}/{self.language}/{self.variant}"

    def serves(self, arch: str) -> bool:
        """Whether this implementation can be compiled for ``arch`` (``sm_90a``)."""
        return _serves(self.archs, arch)

    def why_not_in_space(self, config: Mapping[str, object]) -> str | None:
        """Why ``config`` is not a configuration of the space; None when ``config`` is one.

        A value must be equal to a value of the space and of the same type: 1 stands neither for
        True nor for 1.0.
        """
        checked = self._checked.get(id(config))
        if checked is config:
            return None
        why = self._why_not_in_space(config)
        if why is None and type(config) is Config:  # which nobody changes
            self._checked[id(config)] = config
        return why

    @cached_property
    def _checked(self) -> dict[int, Config]:
        """Configurations of the space, by identity: equal ones may differ in the types of values.

        Those of rows and portfolios are checked at every choice.
        """
        return Bounded[int, Config](1024)

    def _why_not_in_space(self, config: Mapping[str, object]) -> str | None:
        if config.keys() != self.space.keys():
            names = ", ".join(self.space) or "no parameters"
            return f"a config of {self.name} has exactly: {names}"
        for name, values in self.space.items():
            value = config[name]
            if not any(type(value) is type(known) and value == known for known in values):
                names = ", ".join(map(repr, values))
                return f"{name}={reprlib.repr(value)} must be one of: {names}"
        return None

    def why_not(self, config: Config, problem: Problem, gpu: Gpu) -> str | None:
        """Why ``config`` cannot serve ``problem`` on ``gpu``; None when ``config`` can serve."""
        if not self.serves(gpu.arch):
            return f"{self.name} serves {', '.join(self.archs)}, not {gpu.arch}"
        return self.why_not_in_space(config) or self.illegal(config, problem, gpu)

    def why_not_try(self, config: Config, problem: Problem, gpu: Gpu) -> str | None:
        """Why ``config`` cannot serve or is not worth a try; None when it is worth a try."""
        reason = self.why_not(config, problem, gpu) or self.unpromising(config, problem, gpu)
        return reason or self.too_slow(config, problem, gpu)

    def legal(self, problem: Problem, gpu: Gpu) -> Iterator[Config]:
        """Every configuration of the space that can serve ``problem`` on ``gpu``."""
        return self._legal(self._whole_space, problem, gpu)

    def promising(self, problem: Problem, gpu: Gpu) -> Iterator[Config]:
        """The legal configurations that are not unpromising; some are too slow for a try."""
        for config in self._legal(self._hopeful, problem, gpu):
            if self.unpromising(config, problem, gpu) is None:
                yield config

    def _legal(self, configs: tuple[Config, ...], problem: Problem, gpu: Gpu) -> Iterator[Config]:
        if self.serves(gpu.arch):
            for config in configs:
                if self.illegal(config, problem, gpu) is None:
                    yield config

    def configs(self, problem: Problem, gpu: Gpu) -> Iterator[Config]:
        """The legal configurations that are worth a try."""
        for config in self.promising(problem, gpu):
            if self.too_slow(config, problem, gpu) is None:
                yield config

    def whole_space(self) -> Iterator[Config]:
        """Every configuration of the space, legal or not."""
        return iter(self._whole_space)

    @cached_property
    def _whole_space(self) -> tuple[Config, ...]:
        products = itertools.product(*self.space.values())
        return tuple(Config(dict(zip(self.space, values, strict=True))) for values in products)

    @cached_property
    def _hopeful(self) -> tuple[Config, ...]:
        return tuple(each for each in self._whole_space if self.hopeless(each) is None)


class LeastEstimate:
    """Default of an implementation: the configuration with the least estimate.

    Candidates are the configurations worth a try, or the legal ones where none is worth a try. Of
    equal estimates the first in the order of the space is taken. Where nothing is legal the default
    is the first configuration of the space.

    ``alike(problem)`` is a problem with the same default, which is searched in its place: a search
    takes up to a millisecond, and problems of other sizes share it then.
    """

    MAX_REMEMBERED = 1024

    def __init__(
        self,
        implementation: Implementation | None = None,
        alike: Callable[[Problem], Problem] | None = None,
    ) -> None:
        self._implementation, self.alike = implementation, alike
        self._remembered: dict[tuple[Problem, Gpu], Config] = {}

    def __call__(self, problem: Problem, gpu: Gpu) -> Config:
        if self.alike is not None:
            problem = self.alike(problem)
        config = self._remembered.get((problem, gpu))
        if config is None:
            if len(self._remembered) >= self.MAX_REMEMBERED:
                self._remembered.clear()
            config = self._remembered[problem, gpu] = self._choose(problem, gpu)
        return config

    def _choose(self, problem: Problem, gpu: Gpu) -> Config:
        implementation = self._implementation
        assert implementation is not None

        def estimate(config: Config) -> float:
            return implementation.estimate(problem, config, gpu)

        for configs in (implementation.configs(problem, gpu), implementation.legal(problem, gpu)):
            best = min(configs, key=estimate, default=None)
            if best is not None:
                return best
        return next(implementation.whole_space())


def _arch_number(arch: str) -> int:
    """``sm_90a`` -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af+"))


@lru_cache(256)
def _serves(archs: tuple[str, ...], arch: str) -> bool:
    """Whether one of the patterns ``archs`` has ``arch``; a choice asks for each configuration."""
    return any(_matches(pattern, arch) for pattern in archs)


def _matches(pattern: str, arch: str) -> bool:
    if pattern.endswith("+"):
        return _arch_number(arch) >= _arch_number(pattern)
    return pattern == arch
