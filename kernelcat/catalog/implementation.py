"""What an implementation is: a configuration space and the program each configuration means.

A kernel file exports ``IMPLEMENTATIONS``, a tuple of these. Everything else (building, checking,
fuzzing, tuning, dispatch, receipts) works on them alike, in every language.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernelcat.catalog.spec import Problem

if TYPE_CHECKING:
    from kernelcat.jit.artifact import Artifact
    from kernelcat.runtime.gpu import Gpu

ConfigValue = int | str | bool
LANGUAGES = ("cuda", "triton", "cute")

CACHE_LINE = 128
"""Bytes."""


class Config(Mapping[str, ConfigValue]):
    """One choice of every tuning parameter: a frozen, hashable mapping with canonical JSON."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, ConfigValue] | None = None, /, **more: ConfigValue):
        self._values = dict(sorted({**(values or {}), **more}.items()))
        self._hash = hash(tuple(self._values.items()))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._values == dict(other)

    @property
    def key(self) -> str:
        """Canonical JSON: the text the store compares by."""
        return json.dumps(self._values, sort_keys=True, separators=(",", ":"))

    def __reduce__(self) -> tuple[type[Config], tuple[dict[str, ConfigValue]]]:
        return Config, (self._values,)  # hashes of texts differ between processes

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"


class Source(Protocol):
    """What a compiler turns into an artifact; one class per language in ``kernelcat.jit``."""

    language: str

    def text(self) -> str:
        """The code that is compiled, without comments and layout, whatever the instance."""
        ...

    def files(self) -> list[Path]:
        """The files that the text is made of."""
        ...

    def instance(self) -> list[Any]:
        """What makes this instance of the code: its constants and types, and compiler options."""
        ...

    def digest(self) -> str:
        """Hex digest of all that decides the machine code, architecture and toolchain aside."""
        ...

    def toolchain(self) -> str:
        """Name and version of the compiler, told without importing it."""
        ...

    def compile(self, arch: str) -> Artifact:
        """Compile for ``arch`` (``sm_90a``); raises ``CompileError`` or ``MissingDependency``."""
        ...


@dataclass(frozen=True)
class Pointer:
    """The address of a tensor of the entry, or of a workspace; null for an absent optional one."""

    tensor: str


@dataclass(frozen=True)
class Int32:
    value: int


@dataclass(frozen=True)
class Int64:
    value: int


@dataclass(frozen=True)
class Float32:
    value: float


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor over a tensor, passed by value (``__grid_constant__``).

    Sizes run from the innermost dimension out. ``strides`` are in bytes, without the innermost
    one; ``swizzle`` is the span in bytes (0, 32, 64 or 128). ``l2_promotion`` is how many bytes a
    miss brings into L2 (0, 64, 128 or 256); None leaves it to :attr:`promoted_bytes`.
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
        """``l2_promotion``; by default 256 where rows begin at cache lines, else 128.

        Where they do not, every box row straddles lines, and twice as much would come for nothing.
        """
        if self.l2_promotion is not None:
            return self.l2_promotion
        return 256 if all(stride % CACHE_LINE == 0 for stride in self.strides) else 128


Param = Pointer | Int32 | Int64 | Float32 | TensorMap


@dataclass(frozen=True)
class Step:
    """One kernel launch. ``params`` are in the kernel's order, ``grid`` counts blocks.

    ``block`` is the number of threads and ``shared_bytes`` the dynamic shared memory; a Triton
    artifact knows both itself, so they stay 0 there. ``programmatic`` lets the launch begin before
    its predecessor ends (the kernel then waits by ``griddepcontrol.wait``).
    """

    source: Source
    grid: tuple[int, int, int]
    params: tuple[Param, ...]
    block: int = 0
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False


@dataclass(frozen=True)
class Program:
    """The launches one configuration makes for one problem, in stream order.

    ``workspaces`` maps a name to bytes of device memory that are zero before the first run;
    a kernel that uses one as a counter leaves it zero, and a size of 0 is a null pointer. No
    steps: nothing to do (empty problem).
    """

    steps: tuple[Step, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """One variant of an entry in one language.

    Attributes
    ----------
    archs
        Architectures served: ``sm_90a`` exactly, ``sm_80+`` from there on.
    space
        Tuning parameter -> the values tried.
    illegal : ``(config, problem, gpu) -> reason or None``
        Why this configuration cannot serve this problem on this GPU. Everybody obeys it.
    unpromising : ``(config, problem, gpu) -> reason or None``
        Why a configuration that could serve is not worth a try. Only the tuner's search and the
        default obey it; it is asked only of configurations that are legal.
    default : ``(problem, gpu) -> Config``
        A good configuration without any measurement; must be legal where some configuration of
        the space is. By default the one with the least estimate, the first of equals in the order
        of the space.
    program : ``(problem, config, gpu) -> Program``
        What to compile and launch. Called without a GPU too: ``gpu`` is a row of the SKU table.
    estimate : ``(problem, config, gpu) -> microseconds``
        The analytic model that ranks configurations where nothing can be measured.
    techniques : technique -> SASS opcode prefix that proves it (``{"wgmma": "HGMMA"}``)
    rank
        Position on the entry's ladder (naive 0). Without measurements the highest rank serves.
    unverified
        Why there is no receipt (``"needs a Blackwell GPU"``), or None.
    gluon
        Whether Triton code is in its lower dialect Gluon, which has no interpreter.
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
    default: Callable[[Problem, Gpu], Config] = field(default_factory=lambda: LeastEstimate())
    techniques: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    unverified: str | None = None
    gluon: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.default, LeastEstimate):  # of this one, not of one it was copied from
            object.__setattr__(self, "default", LeastEstimate(self))

    @property
    def interpretable(self) -> bool:
        """Whether it runs in Triton's interpreter, without a GPU."""
        return self.language == "triton" and not self.gluon

    @cached_property
    def name(self) -> str:
        """``gemm/cuda/wgmma``: how receipts, rows and the command line call it."""
        return f"{self.entry}/{self.language}/{self.variant}"

    def serves(self, arch: str) -> bool:
        """Whether code for ``arch`` (``sm_90a``) can come of this implementation."""
        return any(_matches(pattern, arch) for pattern in self.archs)

    def why_not(self, config: Config, problem: Problem, gpu: Gpu) -> str | None:
        """Why ``config`` cannot serve, architecture included; None when it can."""
        if not self.serves(gpu.arch):
            return f"{self.name} serves {', '.join(self.archs)}, not {gpu.arch}"
        return self.illegal(config, problem, gpu)

    def legal(self, problem: Problem, gpu: Gpu) -> Iterator[Config]:
        """Every configuration of the space that can serve ``problem`` on ``gpu``."""
        for config in self.whole_space():
            if self.why_not(config, problem, gpu) is None:
                yield config

    def configs(self, problem: Problem, gpu: Gpu) -> Iterator[Config]:
        """Those of the legal ones that are worth a try."""
        for config in self.legal(problem, gpu):
            if self.unpromising(config, problem, gpu) is None:
                yield config

    def whole_space(self) -> Iterator[Config]:
        """Every configuration, whatever it may serve."""
        for values in itertools.product(*self.space.values()):
            yield Config(dict(zip(self.space, values, strict=True)))


class LeastEstimate:
    """The default of an implementation that says none: what its own estimate calls fastest.

    Of configurations worth a try, else of legal ones; the first of the space where nothing serves.
    """

    REMEMBERED = 1024

    def __init__(self, of: Implementation | None = None) -> None:
        self._of = of
        self._known: dict[tuple[Problem, Gpu], Config] = {}

    def __call__(self, problem: Problem, gpu: Gpu) -> Config:
        found = self._known.get((problem, gpu))
        if found is None:
            if len(self._known) >= self.REMEMBERED:
                self._known.clear()
            found = self._known[problem, gpu] = self._least(problem, gpu)
        return found

    def _least(self, problem: Problem, gpu: Gpu) -> Config:
        of = self._of
        assert of is not None
        for configs in (of.configs(problem, gpu), of.legal(problem, gpu)):
            best = min(configs, key=lambda c: of.estimate(problem, c, gpu), default=None)
            if best is not None:
                return best
        return next(of.whole_space())


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af+"))


def _matches(pattern: str, arch: str) -> bool:
    if pattern.endswith("+"):
        return _number(arch) >= _number(pattern)
    return pattern == arch
