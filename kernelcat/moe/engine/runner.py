"""The device's side of an engine: caches, the buffers of steps, CUDA graphs, one stream.

A step is prepared on the host (`prepare`), launched (`launch`, which does not wait), and collected
(`collect`, which waits for its tokens). A step may be launched before the step before it is
collected: tokens that the host does not know yet are gathered on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelcat.moe.cache import KvCache
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.limits import MAX_IN_FLIGHT
from kernelcat.moe.engine.sampling import Choices, Logprobs, Sampler, TokenLogprob, every_choice
from kernelcat.moe.engine.step import Step
from kernelcat.moe.engine.step_buffers import DeviceStep, HostStep
from kernelcat.moe.engine.step_sizes import Size, StepSizes
from kernelcat.moe.model import Decoder
from kernelcat.moe.ranges import span


@dataclass
class Run:
    """A step from its preparation to its result.

    Attributes
    ----------
    choices : how tokens are chosen
    tokens, logprobs : results on the host, complete when ``is_done`` has been recorded and reached
    """

    step: Step
    choices: Choices = field(default_factory=Choices)
    tokens: torch.Tensor | None = None
    logprobs: Logprobs | None = None
    is_done: torch.cuda.Event | None = None


@dataclass
class Graph:
    """The model's run over a step of one size; replays write to ``x`` (rows, hidden)."""

    graph: torch.cuda.CUDAGraph
    x: torch.Tensor
    alive: list[Any] = field(default_factory=list)


class Runner:
    """Runs steps of ``model`` on its device.

    Parameters
    ----------
    model : on a GPU, or on a CPU, where steps run when they are launched
    manager : the pages of the caches
    sizes : of steps
    cache : the tensors of all pages
    """

    def __init__(
        self, model: Decoder, manager: BlockManager, sizes: StepSizes, cache: KvCache
    ) -> None:
        self.model, self.manager, self.sizes, self.cache = model, manager, sizes, cache
        self.sampler = Sampler(model)
        self.is_cuda = model.device.type == "cuda"
        self.stream = torch.cuda.Stream(model.device) if self.is_cuda else None
        self._hosts = [HostStep(manager, sizes, self.is_cuda) for _ in range(MAX_IN_FLIGHT)]
        self._device = DeviceStep(self._hosts[0], model.device)
        self._results = [
            torch.zeros(sizes.largest.rows, dtype=torch.int32, pin_memory=self.is_cuda)
            for _ in range(MAX_IN_FLIGHT)
        ]
        self.graphs: dict[Size, Graph] = {}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything of a step runs on one stream: pages and buffers are used in order."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.device(self.model.device), torch.cuda.stream(self.stream):
                yield

    # ---- a step ---------------------------------------------------------------------------------

    def prepare(self, run: Run) -> None:
        """Writes the arrays of a step, which was planned last, into buffers of its own."""
        size = self.sizes.of(run.step)
        self._host(run).fill(run.step, size)
        run.choices = self.sampler.plan(run.step, size.rows)

    def _host(self, run: Run) -> HostStep:
        """The step's arrays on the host, until the step is collected."""
        return self._hosts[run.step.index % MAX_IN_FLIGHT]

    def launch(self, run: Run) -> None:
        """Starts a step; the host does not wait for a GPU."""
        host = self._host(run)
        with self.on_stream():
            with span("launch"):
                self._device.copy(host)
                x = self._forward(host)
            if host.arrays.size.rows:
                with span("sample"):
                    self._choose(run, host, x)
            self._record(run)

    def _choose(self, run: Run, host: HostStep, x: torch.Tensor) -> None:
        """Chooses the tokens of hidden states x (rows, hidden), and copies them to the host."""
        chosen = self._device.chosen[: len(x)]
        logprobs = self.sampler.choose(
            x, run.choices, lambda name: self._device.view(host, name), chosen
        )
        run.tokens = self._results[run.step.index % MAX_IN_FLIGHT][: run.step.num_rows]
        run.tokens.copy_(chosen[: run.step.num_rows], non_blocking=True)
        if logprobs is not None:
            run.logprobs = logprobs.map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def _record(self, run: Run) -> None:
        if self.stream is not None:
            run.is_done = torch.cuda.Event()
            run.is_done.record(self.stream)

    def _forward(self, host: HostStep) -> torch.Tensor:
        """Hidden states (rows, hidden) of the step on the device."""
        graph = self.graphs.get(host.arrays.size)
        if graph is None:
            return self.model(self._device.batch(host), self.cache)
        graph.graph.replay()
        return graph.x

    def collect(self, run: Run) -> tuple[list[int], list[TokenLogprob | None] | None]:
        """Waits for a step; the token of each row, and log-probabilities if a request wants any."""
        if run.is_done is not None:
            run.is_done.synchronize()
        tokens: list[int] = [] if run.tokens is None else run.tokens.tolist()
        if run.logprobs is None:
            return tokens, None
        counts: list[int | None] = []
        for chunk in run.step.chunks:
            counts += [chunk.request.parameters.logprobs] * chunk.num_rows
        return tokens, run.logprobs.of_rows(counts)

    # ---- before the first step ------------------------------------------------------------------

    def warm_up(self, has_graphs: bool = True) -> None:
        """Compiles what steps of all sizes need, and captures graphs of steps without prompts."""
        self.synchronize_device()
        by_rows: dict[int, Size] = {}
        captured = [*self.sizes.decode(), *self.sizes.verify()]
        for size in self.sizes.every():
            self._run_empty(size)
            by_rows.setdefault(size.rows, size)
        for size in by_rows.values():
            self._run_choices(size)
        if self.is_cuda and has_graphs:
            pool = torch.cuda.graph_pool_handle()
            for size in sorted(captured, key=lambda size: -size.tokens):  # the first makes the pool
                self.graphs[size] = self._capture(size, pool)
            self.synchronize_device()

    def run_largest(self) -> None:
        """Runs the step that allocates most, with all ways to choose tokens."""
        self.synchronize_device()
        self._run_choices(self.sizes.heaviest)
        self.synchronize()

    def _run_empty(self, size: Size, choices: Choices | None = None) -> None:
        """Runs a step of added sequences alone, in the null page."""
        self.launch(self._empty(size, choices or Choices()))

    def _empty(self, size: Size, choices: Choices) -> Run:
        self.synchronize()  # the buffers are in use until the last step has ended
        run = Run(Step(0), choices)
        self._host(run).fill(run.step, size)
        return run

    def _run_choices(self, size: Size) -> None:
        """Runs all kernels that may choose tokens."""
        for choices in every_choice(size.rows, self.sampler.vocab_size):
            self._run_empty(size, choices)

    def _capture(self, size: Size, pool: Any) -> Graph:
        """A graph of the model's run over a step of ``size``, after a run without one."""
        host = self._host(self._empty(size, Choices()))
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.model.device),
            torch.cuda.graph(graph, pool=pool, stream=self.stream),
        ):
            x = self.model(self._device.batch(host), self.cache)
        return Graph(graph, x, self.model.ops.launchers())

    def close(self) -> None:
        """Frees graphs and caches."""
        self.graphs.clear()
        self.cache = KvCache((), ())

    def synchronize_device(self) -> None:
        """Waits for all streams: weights and caches are written on the caller's."""
        if self.is_cuda:
            torch.cuda.synchronize(self.model.device)

    def synchronize(self) -> None:
        """Waits for all steps; raises what a kernel has raised."""
        if self.stream is not None:
            self.stream.synchronize()
