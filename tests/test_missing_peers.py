"""Each named problem has a peer's row beside ours, a reason why not, or a peer that takes it."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.catalog.spec import Peer, Problem
from kernelcat.cli import main
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.ranks import torch_peers
from kernelcat.report import missing_peers
from kernelcat.store import shipped

torch = pytest.importorskip("torch")

REFUSED_BY_A_LAUNCH = {("fp8_gemm", "torch")}
"""Entry and peer that refuses a problem by what its library says of a launch on a GPU."""

ROWS = shipped()
MISSING = missing_peers.missing(ROWS)


def takes(peer: Peer, problem: Problem) -> bool | None:
    """Whether a peer refuses ``problem``; None where its library is not installed.

    Arrays have shapes and no content, so that a peer may fail for other reasons after it has
    accepted the problem.
    """
    entry = catalog.entry(problem.entry)
    arrays: dict[str, Any] = {
        tensor.name: torch.empty(tensor.shape_of(problem), device="meta",
                                 dtype=getattr(torch, tensor.dtype_of(problem)))
        for tensor in entry.present(problem)
    }  # fmt: skip
    try:
        make = peer.load()
    except MissingDependency:
        return None
    try:
        make(problem, arrays)
    except Unsupported:
        return False
    except Exception:
        return True
    return True


WITH_PEER = {
    (row.entry, row.problem_key)
    for row in ROWS
    if row.is_peer and row.kind == "measured" and row.status == "passed"
}
"""Entry and problem of every peer's row."""


@pytest.mark.parametrize("name", catalog.names())
def test_every_named_problem_has_a_peers_row_or_a_reason_or_a_peer_that_may_take_it(
    name: str,
) -> None:
    entry = catalog.entry(name)
    for problem_name, problem in entry.problems.items():
        if (name, problem.key) not in WITH_PEER and entry.why_no_peer(problem_name) is None:
            assert any(takes(peer, problem) is not False for peer in entry.peers), problem_name


@pytest.mark.parametrize("name", catalog.names())
def test_reasons_are_of_problems_that_no_peer_takes(name: str) -> None:
    entry = catalog.entry(name)
    for pattern in entry.without_peer:
        names = [n for n in entry.problems if fnmatchcase(n, pattern)]
        assert names, pattern
        for problem_name in names:
            key = entry.problems[problem_name].key
            assert (name, key) not in WITH_PEER, f"{problem_name} has a peer's row"
            for peer in entry.peers:
                if (name, peer.name) not in REFUSED_BY_A_LAUNCH:
                    assert not takes(peer, entry.problems[problem_name])


@pytest.mark.parametrize("name", catalog.complete())
def test_every_entry_has_a_peer(name: str) -> None:
    entry = catalog.entry(name)
    assert torch_peers.PEERS[name] if entry.ranks else entry.peers


def test_the_verb_lists_what_is_missing() -> None:
    done = CliRunner().invoke(main, ["db", "peers", "--json"])
    found = json.loads(done.stdout)
    assert [(each["entry"], each["problem"]) for each in found] == [
        (each.entry, each.problem) for each in MISSING
    ]
    text = CliRunner().invoke(main, ["db", "peers"]).stdout
    assert "torch's definition has linear scales only" in text
    assert f"{len(MISSING)} problems." in text


def test_a_peer_in_any_race_of_the_problem_counts() -> None:
    problem = catalog.entry("kv_write").named("prefill-8192-32/8x128-fp8")
    rows = [row for row in ROWS if row.entry == "kv_write" and row.problem_key == problem.key]
    assert missing_peers.missing(rows) == []
    (found,) = missing_peers.missing(row for row in rows if not row.is_peer)
    assert (found.problem, found.reason) == ("prefill-8192-32/8x128-fp8", None)
    assert missing_peers.markdown([row for row in rows if not row.is_peer]) == (
        "- `prefill-8192-32/8x128-fp8`: a peer may take it today: race it again.\n"
    )
