"""The served site: the live database over HTTP, on this machine alone, and nothing is changed."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import hear_ctrl_c

from kernelcat.cli import main
from kernelcat.report.board import shipped
from kernelcat.report.site import Results, serve
from kernelcat.store import Measurement, Store
from kernelcat.store.measurement import new_run, now

EVIL = "<script>alert(1)</script>"


def row(name: str) -> Measurement:
    """A committed row with another name, as of a later race."""
    protocol = {"regime": "graph", "l2": "cold", "state": "sustained"}
    real = next(r for r in shipped() if r.entry == "gemm" and r.winner and r.protocol == protocol)
    return replace(real, problem_name=name, run=new_run(), created_at=now())


def add(path: Path, measurement: Measurement) -> None:
    with Store.open(path) as store:
        store.add([measurement])


@pytest.fixture
def database(tmp_path: Path) -> Path:
    add(tmp_path / "results.sqlite3", row(EVIL))
    return tmp_path / "results.sqlite3"


@pytest.fixture
def site(database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[serve.Site]:
    monkeypatch.setattr(serve, "FRESH_S", 0.0)
    with serve.Site(Results(entry="gemm", url=str(database)), 0) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site
        site.shutdown()
        thread.join()


def request(
    site: serve.Site, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(serve.ADDRESS, site.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode("utf-8")
    connection.close()
    return answer, content


def test_pages_show_the_database_and_escape_its_names(site: serve.Site) -> None:
    answer, content = request(site, "/")
    assert answer.status == 200 and "gpu-h200.html" in content
    assert "default-src 'none'" in str(answer.headers["Content-Security-Policy"])
    answer, content = request(site, "/entry-gemm.html?from=overview")
    assert answer.status == 200
    assert EVIL not in content and "&lt;script&gt;alert(1)" in content


def test_a_new_row_is_shown_and_the_file_is_left_alone(site: serve.Site, database: Path) -> None:
    assert "fresh-row" not in request(site, "/entry-gemm.html")[1]
    add(database, row("fresh-row"))
    before = database.read_bytes()
    assert "fresh-row" in request(site, "/entry-gemm.html")[1]
    assert database.read_bytes() == before


def test_what_is_not_a_page_is_refused(site: serve.Site) -> None:
    assert request(site, "/../../etc/passwd")[0].status == 404
    assert request(site, f"/{EVIL}")[0].status == 404
    assert request(site, "/", "POST")[0].status == 501
    assert request(site, "/", "HEAD")[1] == ""
    assert request(site, "/", Host=f"evil.example:{site.server_port}")[0].status == 403


def test_a_database_that_vanished_is_told(site: serve.Site, database: Path) -> None:
    database.unlink()
    answer, content = request(site, "/")
    assert answer.status == 503 and "database" in content


def test_the_verb_serves_until_it_is_interrupted(database: Path) -> None:
    command = [sys.executable, "-m", "kernelcat", "leaderboard", "--serve", "--port", "0",
               "--db", str(database)]  # fmt: skip
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=hear_ctrl_c,
    ) as server:
        assert server.stdout and server.stderr
        try:
            url = server.stdout.readline().split()[0]
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert answer.status == 200
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=30) == 0, server.stderr.read()
        finally:
            server.kill()  # nothing to do where the server has ended


def test_serve_takes_no_other_form_and_a_taken_port_is_one_line(
    site: serve.Site, database: Path
) -> None:
    assert CliRunner().invoke(main, ["leaderboard", "--serve", "--csv"]).exit_code == 2
    taken = ["leaderboard", "--serve", "--db", str(database), "--port"]
    done = CliRunner().invoke(main, [*taken, str(site.server_port)])
    assert done.exit_code == 1 and done.output.count("\n") == 1, done.output
