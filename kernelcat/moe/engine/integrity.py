"""Proof that requests, queues, steps in flight and block tables agree.

`BlockManager.check_integrity` proves that block tables and pages agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kernelcat.moe.engine.block_hashes import extend_hashes
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.pages import IntegrityError
from kernelcat.moe.engine.queue import RequestQueue
from kernelcat.moe.engine.request import Request, State
from kernelcat.moe.engine.step import Step


def check_queue(queue: RequestQueue, in_flight: Iterable[Step]) -> None:
    """Compares the state of all requests with what follows from tokens, queues and steps.

    Raises
    ------
    IntegrityError
        A request is in no queue or in two, has overtaken an older one, has pages that it should not
        have or lacks some, or a page that it may still write is known to others.
    """
    faults = []
    requests = [*queue.running, *queue.waiting]
    if Counter(requests) != Counter(queue.requests.values()):
        faults.append("requests that have not ended are not those that run or wait")
    orders = [request.order for request in requests]
    if orders != sorted(orders):
        faults.append(f"running, then waiting: the order of arrival is {orders}")
    if queue.tables != queue.manager.tables:
        faults.append("open block tables are not those of requests that have pages")
    pending: Counter[Request] = Counter()
    written: dict[Request, int] = {}
    for step in in_flight:
        for chunk in step.chunks:
            pending[chunk.request] += chunk.num_rows
            if chunk.num_preemptions == chunk.request.num_preemptions:
                written.setdefault(chunk.request, chunk.start)
    for request in requests:
        state = State.RUNNING if request in queue.running else State.WAITING
        found = [f"state is {request.state}, not {state}"] if request.state is not state else []
        if request.num_pending != pending[request]:
            found.append(f"num_pending={request.num_pending}, in flight are {pending[request]}")
        if state is State.RUNNING:
            num_written = written.get(request, request.num_computed)
            found += _table_faults(request, queue.manager, num_written)
        elif request.table not in queue.tables and (request.table or request.num_computed):
            found.append("waits, and has pages")
        faults += [f"request {request.id}: {fault}" for fault in found]
    if faults:
        raise IntegrityError("; ".join(faults))


def _table_faults(request: Request, manager: BlockManager, num_written: int) -> list[str]:
    """What is wrong with the block table of a running request.

    ``num_written`` tokens are in the cache since steps that have ended.
    """
    table, size = request.table, manager.page_size
    if table is None:
        return ["runs, and has no pages"]
    found, hashes = [], list[bytes]()
    extend_hashes(hashes, request.tokens, size, request.salt)
    if request.hashes != hashes[: len(request.hashes)] or table.hashes is not request.hashes:
        found.append("hashes are not those of the tokens")
    if not num_written <= request.num_computed < len(request.tokens) + max(request.num_pending, 1):
        found.append(f"num_computed={request.num_computed} of {len(request.tokens)} tokens")
    if table.num_blocks != manager.blocks_of(request.num_computed):
        found.append(f"{table.num_blocks} blocks for {request.num_computed} tokens")
    for g, group in enumerate(manager.groups):
        if table.first_blocks[g] > group.first_block(num_written, size):
            found.append(f"group {group.name}: a page of the window has been given back")
        for block in range(num_written // size, table.num_blocks):
            if manager.pools[g].hash_of(int(table.pages[g, block])) is not None:
                found.append(f"group {group.name}: block {block} is not full, and is published")
    return found
