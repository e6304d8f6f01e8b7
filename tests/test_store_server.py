"""Results on a PostgreSQL server that is restarted, stopped, killed, full or busy."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from postgres import Server
from processes import next_line

from kernelcat.errors import StoreError
from kernelcat.store import Measurement, Store, journal, snapshot

ROW = json.loads(Path(__file__).with_name("measurement.json").read_text())


@pytest.fixture(autouse=True)
def journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals of servers are in the user's data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def measurements(count: int, **changes: object) -> list[Measurement]:
    return [Measurement.from_json(ROW | {"config": {"i": i}} | changes) for i in range(count)]


KEEPER = """
import json, sys
from kernelcat.store import Measurement, Store
url, row, name, count = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with Store.open(url) as store:
    kept = 0
    for i in range(count):
        kept += store.keep([Measurement.from_json(row | {"run": name, "config": {"i": i}})])
        store.rows(run=name)
        if i == 0:
            print("begun", flush=True)
    print(kept)
"""


def keeper(url: str, name: str, count: int) -> subprocess.Popen[str]:
    """A process that keeps rows one by one, and reads them after each."""
    return subprocess.Popen(
        [sys.executable, "-c", KEEPER, url, json.dumps(ROW), name, str(count)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_is_restarted_costs_no_row_and_no_reader(
    own_server: Server, number: int
) -> None:
    """SIGINT ends connections in order, SIGQUIT as a crash does, with recovery at the start."""
    url = own_server.database("tuning")
    keepers = [keeper(url, f"run{i}", 150) for i in range(3)]
    for process in keepers:  # all have begun
        assert next_line(process) == "begun\n"
    for _ in range(3):
        own_server.stop(number)
        time.sleep(0.2)
        own_server.start()
        time.sleep(0.1)
    ends = [process.communicate(timeout=120) for process in keepers]
    assert [error for _, error in ends] == [""] * 3
    assert [out for out, _ in ends] == ["150\n"] * 3  # none went to the journal
    with Store.open(url) as store:
        rows = store.rows()
    assert len(rows) == len({row.digest for row in rows}) == 450


def test_rows_wait_in_the_journal_while_the_server_is_away(own_server: Server) -> None:
    url = own_server.database("tuning")
    rows = measurements(4)
    with Store.open(url, timeout=0.5) as store:
        assert store.keep(rows[:1])
        own_server.stop()
        with pytest.warns(UserWarning, match="Results go to .*journal"):
            assert store.keep(rows[1:2]) is False
        assert store.keep(rows[2:3]) is False
        with pytest.raises(StoreError, match="cannot use the tuning database"):
            store.rows()
        assert store.journal.path.exists()
        own_server.start()
    with Store.open(url) as store:  # closing has added the rows already
        assert store.rows() == rows[:3] and not store.journal.path.exists()
        own_server.stop()
        store._timeout = 0.5
        with pytest.warns(UserWarning, match="Results go to .*journal"):
            store.keep(rows[3:])
    own_server.start()  # too late for close(): the next open() adds the row
    with Store.open(url) as store:
        assert store.rows() == rows and not store.journal.path.exists()


def test_a_full_disk_of_the_server_sends_rows_to_the_journal(own_server: Server) -> None:
    url = own_server.database("tuning")
    rows = measurements(3000)  # of about 1 KB
    own_server.stop()
    own_server.start(file_bytes=(1 << 20) + 8192)  # files of the log have 1 MiB
    with Store.open(url) as store:
        assert store.keep(rows[:10])
        with pytest.raises(StoreError, match="the disk of the server is full: free some space"):
            store.add(rows)
        assert store.rows() == rows[:10]  # all or nothing
        with pytest.warns(UserWarning, match="the disk of the server is full"):
            assert store.keep(rows) is False
        store._journaling = False  # as in a process that is killed
    own_server.stop()
    own_server.start()
    with Store.open(url) as store:
        assert store.rows() == rows


def test_a_full_disk_here_and_no_server_is_an_error(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort fails too: the user is told at once, not after hours of measuring."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    url = own_server.database("tuning")
    with Store.open(url, timeout=0.2) as store:
        own_server.stop()
        monkeypatch.setattr(journal.os, "fsync", full)
        with (
            pytest.warns(UserWarning, match="Results go to"),
            pytest.raises(StoreError, match=r"No space left on device.*are not being kept"),
        ):
            store.keep(measurements(1))


def test_writers_of_the_same_rows_in_opposite_order_do_not_block_each_other(
    server: Server,
) -> None:
    """Without one lock for all writers, each would wait for a row of the other: a deadlock."""
    url = server.database("opposite")
    code = KEEPER.partition("with Store")[0] + (
        "rows = [Measurement.from_json(row | {'config': {'i': i}}) for i in range(count)]\n"
        "store = Store.open(url)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "print(store.add(rows if name == 'up' else rows[::-1]))\n"
    )
    command = [sys.executable, "-c", code, url, json.dumps(ROW)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen([*command, name, "2000"], stdin=pipe, stdout=pipe, stderr=pipe,
                             text=True) for name in ("up", "down")]  # fmt: skip
    for process in both:
        assert next_line(process) == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=60) for process in both]
    assert [error for _, error in ends] == ["", ""]
    assert sorted(int(out) for out, _ in ends) == [0, 2000]


def test_a_call_uses_shipped_results_while_the_server_is_away(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_server.database("tuning")
    Store.open(url).close()
    own_server.stop()
    started = time.monotonic()
    with pytest.warns(UserWarning, match="Using shipped results only"):
        assert snapshot(url).choices("gemm")
    assert time.monotonic() - started < 5
