"""The device's side of an engine: caches, the buffers of steps, CUDA graphs, streams.

A step is prepared on the host (`prepare`), launched (`launch`, which does not wait), and collected
(`collect`, which waits for its tokens). A step may be launched before the step before it is
collected: tokens that the host does not know yet are gathered on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kernelcat.errors import RankFailed
from kernelcat.moe.cache import KvCache
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.host_cache import Transfer
from kernelcat.moe.engine.host_copies import HostCopies
from kernelcat.moe.engine.limits import MAX_IN_FLIGHT
from kernelcat.moe.engine.pages_out import Link, PageMoves, page_moves
from kernelcat.moe.engine.sampling import Choices, Logprobs, Sampler, TokenLogprob, every_choice
from kernelcat.moe.engine.step import Step
from kernelcat.moe.engine.step_buffers import StepBuffers, allocate
from kernelcat.moe.engine.step_sizes import Size, StepSizes
from kernelcat.moe.engine.streams import DeviceStream, Event
from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel.messages import Close, Launch
from kernelcat.moe.ranges import span


@dataclass
class Run:
    """A step from its preparation to its result.

    Attributes
    ----------
    choices : how tokens are chosen
    moves : pages that the step sends, for each layer group; () for none
    tokens, logprobs : results on the host, complete when ``is_done`` is reached
    """

    step: Step
    choices: Choices = field(default_factory=Choices)
    moves: Sequence[PageMoves] = ()
    tokens: torch.Tensor | None = None
    logprobs: Logprobs | None = None
    is_done: Event = None


@dataclass
class Graph:
    """The model's run over a step of one size; replays write to ``x`` (rows, hidden)."""

    graph: torch.cuda.CUDAGraph
    x: torch.Tensor
    alive: list[Any] = field(default_factory=list)


class Runner:
    """Runs steps of ``model`` on its device.

    Three streams work beside each other: a step's arrays are copied to the device while the step
    before it runs, and the tokens of that step are copied back while this one runs. So nothing but
    kernels lies between the kernels of two steps.

    Parameters
    ----------
    model : on a GPU, or on a CPU, where steps run when they are launched
    manager : the pages of the caches
    sizes : of steps
    cache : the tensors of all pages

    Attributes
    ----------
    copies : of pages to host memory and back, on streams of their own; None without host memory
    link : the way to another engine's cache; None for no other
    """

    def __init__(
        self, model: Decoder, manager: BlockManager, sizes: StepSizes, cache: KvCache
    ) -> None:
        self.model, self.manager, self.sizes, self.cache = model, manager, sizes, cache
        self.exchange = model.peers
        self.sampler = Sampler(model)
        self.is_cuda = model.device.type == "cuda"
        # of copies to the device, of steps, of copies from the device
        self.streams = [DeviceStream(model.device) for _ in range(3)]
        self.link: Link | None = None
        self._buffers = allocate(manager, sizes, model.device, MAX_IN_FLIGHT)
        self.graphs: dict[tuple[StepBuffers, Size], Graph] = {}
        self.copies: HostCopies | None = None
        self._computed: Event = None

    # ---- a step ---------------------------------------------------------------------------------

    def prepare(self, run: Run, size: Size) -> None:
        """Writes the arrays of a step, which was planned last, into its buffers.

        The step that had the buffers before has been collected. It is padded to ``size``.
        """
        self._buffers_of(run).fill(run.step, size)
        run.choices = self.sampler.plan(run.step, size.rows)
        if self.link is not None:
            groups, page_size = len(self.manager.groups), self.manager.page_size
            moves = page_moves(run.step, groups, page_size)
            run.moves = moves if any(each.sources for each in moves) else ()

    def receive(self, run: Run, size: Size, data: bytes) -> None:
        """Writes the arrays of a step that another rank has prepared; as in `prepare`."""
        self._buffers_of(run).write(size, data)

    def _buffers_of(self, run: Run) -> StepBuffers:
        """The step's buffers, until the step is collected."""
        return self._buffers[run.step.index % MAX_IN_FLIGHT]

    def launch(self, run: Run) -> None:
        """Starts a step; the host does not wait for a GPU."""
        buffers = self._buffers_of(run)
        if run.step.chunks:  # steps without any are those that all ranks run by themselves
            self._tell(run, buffers)
        copies_in, steps, copies_out = self.streams
        copied = copies_in.run(buffers.copy_in)
        for abandoned in self.copies.abandoned() if self.copies else ():
            steps.wait(abandoned)
        self._computed = steps.run(partial(self._compute, run, buffers), copied)
        if run.moves and self.link is not None:  # pages may have other owners in the next step
            self._computed = steps.run(lambda: None, self.link.end())
        run.is_done = copies_out.run(partial(self._copy_out, run, buffers), self._computed)

    def move(self, transfers: Sequence[Transfer]) -> None:
        """Starts transfers, which were planned with the step that is launched next."""
        for transfer in transfers:
            assert self.copies is not None
            self.copies.start(transfer, self._computed)

    def _tell(self, run: Run, buffers: StepBuffers) -> None:
        """Has the ranks that follow launch the step."""
        if self.exchange is not None and self.exchange.followers is not None:
            choices = replace(run.choices, failed=())
            size, data = buffers.arrays.size, buffers.written()
            self.exchange.tell(Launch(run.step.index, size, data, choices))

    def _compute(self, run: Run, buffers: StepBuffers) -> None:
        """Runs the model, and chooses tokens."""
        with span("launch"):
            x = self._forward_and_send(buffers, run.moves) if run.moves else self._forward(buffers)
        if buffers.arrays.size.rows:
            with span("sample"):
                chosen = buffers.chosen[: len(x)]
                logprobs = self.sampler.choose(x, run.choices, buffers.view, chosen)
                if logprobs is not None:
                    run.logprobs = logprobs.map(lambda each: each.to("cpu", non_blocking=True))

    def _copy_out(self, run: Run, buffers: StepBuffers) -> None:
        run.tokens = buffers.copy_out(run.step.num_rows)

    def _forward(
        self, buffers: StepBuffers, after_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Hidden states (rows, hidden) of the step on the device.

        ``after_layer`` gets each layer's number when the layer has been launched.
        """
        graph = self.graphs.get((buffers, buffers.arrays.size))
        if graph is None:
            return self.model(buffers.batch(), self.cache, after_layer)
        graph.graph.replay()
        if after_layer is not None:
            for layer in range(len(self.cache.layers)):
                after_layer(layer)
        return graph.x

    def _forward_and_send(self, buffers: StepBuffers, moves: Sequence[PageMoves]) -> torch.Tensor:
        """As `_forward`; pages of a layer are sent while later layers are computed."""
        assert self.link is not None
        self.link.begin(moves)
        return self._forward(buffers, self.link.send)

    def collect(self, run: Run) -> tuple[list[int], list[TokenLogprob | None] | None]:
        """Waits for a step; the token of each row, and log-probabilities if a request wants any."""
        if run.is_done is not None:
            run.is_done.synchronize()
        if self.exchange is not None:
            self.exchange.check()
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
                for index in range(MAX_IN_FLIGHT):
                    buffers = self._buffers_of(self._empty(size, Choices(), index))
                    self.graphs[buffers, size] = self._capture(buffers, pool)
            self.synchronize_device()

    def run_largest(self) -> None:
        """Runs the step that allocates most, with all ways to choose tokens."""
        self.synchronize_device()
        self._run_choices(self.sizes.heaviest)
        self.synchronize()

    def _run_empty(self, size: Size, choices: Choices | None = None) -> None:
        """Runs a step of added sequences alone, in the null page."""
        self.launch(self._empty(size, choices or Choices()))

    def _empty(self, size: Size, choices: Choices, index: int = 0) -> Run:
        self.synchronize()  # the buffers are in use until the last step has ended
        run = Run(Step(index), choices)
        self._buffers_of(run).fill(run.step, size)
        return run

    def _run_choices(self, size: Size) -> None:
        """Runs all kernels that may choose tokens."""
        for choices in every_choice(size.rows, self.sampler.vocab_size):
            self._run_empty(size, choices)

    def _capture(self, buffers: StepBuffers, pool: Any) -> Graph:
        """A graph of the model's run over the step in ``buffers``, after a run without one."""
        graph, stream = torch.cuda.CUDAGraph(), self.streams[1]
        with (
            torch.cuda.device(stream.device),
            torch.cuda.graph(graph, pool=pool, stream=stream.cuda),
        ):
            x = self.model(buffers.batch(), self.cache)
        return Graph(graph, x, self.model.launchers())

    def close(self) -> None:
        """Frees graphs, caches and host memory, on all ranks."""
        if self.exchange is not None and self.exchange.followers is not None:
            with suppress(RankFailed):  # what has failed has nothing to free
                self.exchange.tell(Close())
        self.graphs.clear()
        if self.copies is not None:
            self.copies.close()
            self.copies = None
        self.cache = KvCache((), ())

    def synchronize_device(self) -> None:
        """Waits for all streams: weights and caches are written on the caller's."""
        if self.is_cuda:
            torch.cuda.synchronize(self.model.device)

    def synchronize(self) -> None:
        """Waits for all steps and transfers.

        Raises what a kernel has raised, and ``RankFailed`` where a rank has failed.
        """
        for stream in self.streams:
            stream.synchronize()
        if self.copies is not None:
            self.copies.synchronize()
        if self.exchange is not None:
            self.exchange.check()
        if self.link is not None:
            self.link.synchronize()
