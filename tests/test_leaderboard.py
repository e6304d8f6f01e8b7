"""The leaderboard: ratios within one run, and equal cells in the terminal, Markdown and HTML."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import real_rows
from click.testing import CliRunner
from rich.console import Console

from kernelcat.catalog.digest import digest_of
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, StoreError, UnknownName
from kernelcat.report.board import board, load, means, published
from kernelcat.report.ladder import ladders
from kernelcat.report.page import to_html
from kernelcat.report.readme import update_readme
from kernelcat.report.render import table, to_json, to_markdown
from kernelcat.runtime import environment
from kernelcat.store import Measurement, Store, database

ROW: dict[str, Any] = json.loads(Path(__file__).with_name("measurement.json").read_text())
PEER = {"language": "peer", "config": {}, "source": ""}


def timed(us: float, **changes: Any) -> Measurement:
    times = {"median_us": us, "ci_us": [us * 0.999, us * 1.001]}
    return Measurement.from_json(ROW | times | changes)


def current(row: Measurement) -> bool:
    return row.source == ROW["source"]


def small(**changes: Any) -> dict[str, Any]:
    return {"problem": ROW["problem"] | {"M": 16}, "problem_name": "16x4096x4096"} | changes


@pytest.fixture
def rows() -> list[Measurement]:
    """A large problem where cuBLAS is fastest, and a small problem where our kernels are."""
    return [
        timed(200.0),
        timed(250.0, language="triton", variant="tma"),
        timed(300.0, language="triton", variant="tiled"),
        timed(180.0, variant="cublas", **PEER),
        timed(220.0, variant="quack", **PEER),
        timed(10.0, **small()),
        timed(10.05, **small(), language="cute", variant="wgmma"),
        timed(20.0, **small(variant="cublas"), **PEER),
    ]


def test_ratios_and_rates_come_from_the_newest_run(rows: list[Measurement]) -> None:
    older_run = timed(1.0, run="old", created_at="2026-01-01T00:00:00Z")
    big_row, small_row = board([*rows, older_run], gpu="h200", entry="gemm", is_current=current)
    assert (big_row.title, small_row.title) == ("4096x4096x4096", "16x4096x4096")
    assert (big_row.language, big_row.variant, big_row.median_us) == ("cuda", "wgmma", 200.0)
    assert big_row.tflops == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)
    assert big_row.bound == "compute"
    assert big_row.roofline == pytest.approx(2 * 4096**3 / 989.4e12 / 200e-6)
    assert big_row.peers == pytest.approx({"cublas": 0.9, "quack": 1.1})
    assert big_row.languages == pytest.approx({"cuda": 0.9, "triton": 0.72})
    assert (big_row.baseline, big_row.ties, big_row.stale) == ("cublas", (), False)
    assert small_row.bound == "memory"
    assert small_row.tbps == pytest.approx(2 * (16 * 4096 * 2 + 4096**2) / 10e-6 / 1e12)
    assert small_row.ties == ("cute/wgmma",)
    assert small_row.peers == {"cublas": 2.0}


def test_means_are_geometric_over_the_problems_that_have_a_value(rows: list[Measurement]) -> None:
    total = means(board(rows, is_current=current))
    assert total.problems == 2
    assert total.peers == pytest.approx({"cublas": (0.9 * 2.0) ** 0.5, "quack": 1.1})
    assert total.languages["triton"] == pytest.approx(0.72)
    without_peers = timed(1.0, **small(problem=ROW["problem"] | {"M": 1}))
    assert means(board([*rows, without_peers], is_current=current)).languages == total.languages


def test_without_peers_languages_are_compared_with_the_winner() -> None:
    (row,) = board([timed(10.0), timed(20.0, language="triton")], is_current=current)
    assert row.baseline == "cuda/wgmma"
    assert row.languages == {"cuda": 1.0, "triton": 0.5}


def test_a_row_is_stale_when_the_sources_changed() -> None:
    assert board([timed(10.0)])[0].stale
    digest = digest_of("gemm", "triton", "tma")
    assert not board([timed(10.0, language="triton", variant="tma", source=digest)])[0].stale


def test_a_prediction_appears_only_where_nothing_was_measured() -> None:
    guess = {"kind": "predicted", "ci_us": None, "samples": 0, "median_us": 5.0}
    guess["protocol"] = ROW["protocol"] | {"state": "predicted"}
    predicted = [Measurement.from_json(ROW | guess | {"gpu": gpu}) for gpu in ("h200", "b200")]
    ranked = board([timed(10.0), *predicted], is_current=current)
    assert [(row.gpu, row.kind) for row in ranked] == [("b200", "predicted"), ("h200", "measured")]
    text = to_markdown(ranked)
    assert "gemm --gpu b200`: predicted 2026-11-20" in text
    assert "~5.00" in text and "nothing ran" in text


def in_state(us: float, state: str, **changes: Any) -> Measurement:
    return timed(us, protocol=ROW["protocol"] | {"state": state}, **changes)


def test_sustained_timings_rank_first_and_other_states_can_be_requested(tmp_path: Path) -> None:
    rows = [in_state(9.0, "burst", created_at="2026-12-01T00:00:00Z"), timed(10.0),
            in_state(1.0, "ladder"), in_state(1.0, "screen"),
            in_state(2.0, "burst", **small())]  # fmt: skip
    ranked = board(rows, is_current=current)
    assert [(row.state, row.median_us) for row in ranked] == [("sustained", 10.0), ("burst", 2.0)]
    (burst, small_row) = board(rows, state="burst", is_current=current)
    assert (burst.median_us, small_row.median_us) == (9.0, 2.0)
    text = to_markdown([burst, small_row])
    assert "`kernelcat leaderboard gemm --gpu h200 --state burst`: measured" in text
    assert " to 2026-12-01, burst, run " in text
    path = tmp_path / "README.md"
    path.write_text("<!-- leaderboard:gemm:h200:graph:burst -->\n<!-- /leaderboard -->")
    assert update_readme(path, rows)
    assert "| 9.00 ± 0.01 |" in path.read_text() and "10.0" not in path.read_text()


@pytest.fixture
def climb() -> list[Measurement]:
    """A ladder in two languages with a peer, and two rows that belong to no ladder."""
    return [in_state(us, "ladder", **changes) for us, changes in (
        (200.0, {"variant": "wgmma"}), (2000.0, {"variant": "tiled"}),
        (200_000.0, {"variant": "naive"}), (400.0, {"language": "triton", "variant": "tiled"}),
        (250.0, {"language": "triton", "variant": "tma"}),
        (250.0, {"language": "triton", "variant": "tma", "run": "older",
                 "created_at": "2026-01-01T00:00:00Z"}),
        (180.0, {"variant": "cublas", **PEER}),
    )] + [timed(1.0), in_state(1.0, "burst")]  # fmt: skip


def test_pages_show_named_problems_and_those_with_a_peer(rows: list[Measurement]) -> None:
    with_peers, alone = board(rows, "h200"), board([timed(10.0)], "h200")
    assert published([*with_peers, *alone]) == [*with_peers, *alone]
    unnamed = [replace(row, problem_name=None) for row in (*with_peers, *alone)]
    assert published(unnamed) == unnamed[: len(with_peers)]


def test_a_ladder_gives_the_speedup_of_each_step(climb: list[Measurement]) -> None:
    (ladder,) = ladders(climb, "gemm", problem="4096x4096x4096", is_current=current)
    steps = {f"{s.language}/{s.variant}": (s.over_previous, s.over_first) for s in ladder.steps}
    assert list(steps.items()) == [
        ("cuda/naive", (None, 1.0)),
        ("cuda/tiled", (100.0, 100.0)),
        ("cuda/wgmma", (10.0, 1000.0)),
        ("triton/tiled", (None, 500.0)),
        ("triton/tma", (1.6, 800.0)),
    ]
    assert ladder.steps[2].techniques["wgmma"] == "HGMMA"
    assert ladder.steps[2].peers == {"cublas": 0.9}
    assert ladder.steps[2].rates.tflops == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)
    assert not ladder.steps[0].stale
    assert all(step.stale for step in ladders(climb, "gemm")[0].steps)


def test_ladders_are_selected_by_entry_gpu_and_problem(
    climb: list[Measurement],
) -> None:
    assert ladders(climb, "tma_copy") == []
    assert ladders(climb, "gemm", gpu="b200") == []
    assert ladders(climb, "gemm", problem="8192x8192x8192") == []
    with pytest.raises(UnknownName, match="has no problem '4096'"):
        ladders(climb, "gemm", problem="4096")


def test_a_readme_marker_is_filled_with_a_ladder(tmp_path: Path, climb: list[Measurement]) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- ladder:gemm:h200:4096x4096x4096 -->\n<!-- /ladder -->\nend\n")
    assert update_readme(path, climb)
    head, _, naive, *_ = cells_of_markdown(path.read_text())
    assert head == ["step", "µs", "rate", "× step before", "× cuda/naive", "× cublas",
                    "proven in the machine code"]  # fmt: skip
    assert naive[:6] == ["cuda/naive†", "200,000 ± 200", "0.69 TFLOP/s", "", "1.00", "0.0009"]
    text = path.read_text()
    assert "`kernelcat ladder gemm --problem 4096x4096x4096 --gpu h200`: measured" in text
    assert "`HGMMA`" in text and text.endswith("<!-- /ladder -->\nend\n")
    path.write_text("<!-- ladder:gemm:h200 -->\n<!-- /ladder -->\n")
    with pytest.raises(InvalidArgument, match="is no marker"):
        update_readme(path, climb)


def test_rows_of_unknown_gpus_entries_and_axes_do_no_harm() -> None:
    older = {"problem": {"M": 1, "N": 1, "K": 1}}
    assert board([timed(1.0, **older)], is_current=current) == []
    assert board([timed(1.0, entry="removed_entry")], is_current=current) == []
    (row,) = board([timed(10.0, gpu="h200-mig-1g.18gb")], is_current=current)
    assert row.roofline is None
    assert "h200-mig-1g.18gb" in to_html([row])


@pytest.mark.parametrize(("installed", "warned"), [("13.0.88", False), ("13.9.1", True)])
def test_the_board_warns_where_the_installed_compiler_differs(
    rows, installed, warned, monkeypatch, capsys
) -> None:
    versions = {"nvrtc": installed, "triton": "3.6.0", "cutlass-dsl": "none"}
    monkeypatch.setattr(environment, "compilers", lambda: versions)
    ranked = board(rows, is_current=current)
    Console().print(table(ranked))
    text = " ".join(capsys.readouterr().out.split())
    assert ("nvrtc 13.0.88 then, 13.9.1 here" in text) == warned
    assert ("13.9.1" in to_json(ranked)) == warned
    assert "13.9.1" not in to_markdown(ranked)  # Markdown is read on other machines


def test_json_has_the_rows_and_the_means(rows: list[Measurement]) -> None:
    ranked = board(rows, is_current=current)
    parsed = json.loads(to_json(ranked))
    assert [row["median_us"] for row in parsed["rows"]] == [200.0, 10.0]
    total = parsed["means"]["gemm/h200/graph/measured/sustained"]
    assert total["peers"]["quack"] == pytest.approx(1.1)


def cells_of_markdown(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


class Cells(HTMLParser):
    """The cells of a page's tables; fails on a tag that is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_terminal_markdown_and_html_show_equal_cells(rows: list[Measurement]) -> None:
    ranked = board(rows, is_current=current)
    markdown = cells_of_markdown(to_markdown(ranked))
    del markdown[1]
    page = Cells()
    page.feed(to_html(ranked))
    assert page.open == []
    assert page.rows == markdown
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table(ranked))
    printed = console.export_text()
    for line in markdown:
        assert re.search(r"\s+".join(re.escape(cell) for cell in line if cell), printed)
    assert markdown[1] == [
        "4096x4096x4096", "cuda/wgmma", "200.0 ± 0.2", "687 TFLOP/s", "69%", "0.90", "1.10",
        "0.90", "0.72", "",
    ]  # fmt: skip
    assert markdown[2][1] == "cuda/wgmma≈"


def test_a_page_loads_no_other_file_and_escapes_text() -> None:
    evil = timed(10.0, problem_name="<script>alert(1)</script>", config={"a": "<b>"})
    page = to_html(board([evil], is_current=current), title="a & b")
    assert "<script" not in page and "&lt;script&gt;" in page and "a &amp; b" in page
    assert 'title="a=&lt;b&gt;"' in page
    assert "http" not in page


def test_an_empty_board_says_that_nothing_was_measured() -> None:
    assert "Nothing measured yet" in to_markdown([]) and "Nothing measured yet" in to_html([])
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table([]))
    assert "run kernelcat tune" in console.export_text()


def test_the_readme_is_filled_in_between_its_markers(
    tmp_path: Path, rows: list[Measurement]
) -> None:
    path = tmp_path / "README.md"
    path.write_text(
        "# Title\n<!-- leaderboard:gemm:h200 -->\nold\n<!-- /leaderboard -->\nkept\n"
        "<!-- leaderboard:gemm:h200:eager --><!-- /leaderboard -->\nend\n"
    )
    assert update_readme(path, rows) is True
    text = path.read_text()
    assert "| 4096x4096x4096 | cuda/wgmma" in text
    assert "old" not in text and "\nkept\n" in text and text.endswith("\nend\n")
    assert "Nothing measured yet.\n<!-- /leaderboard -->" in text
    assert update_readme(path, rows) is False


def test_problems_are_selected_by_a_pattern(tmp_path: Path, rows: list[Measurement]) -> None:
    assert [r.title for r in board(rows, problem="16x*", is_current=current)] == ["16x4096x4096"]
    assert board(rows, problem="16x", is_current=current) == []
    path = tmp_path / "README.md"
    path.write_text("<!-- leaderboard:gemm:h200:graph:sustained:16x* --><!-- /leaderboard -->")
    assert update_readme(path, rows)
    text = path.read_text()
    assert "16x4096x4096" in text and "\n| 4096x4096x4096" not in text
    assert "--problem '16x*'`" in text


def test_a_readme_without_markers_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(InvalidArgument, match="has no leaderboard: add <!-- leaderboard"):
        update_readme(tmp_path / "README.md")


def test_load_reads_shipped_and_local_rows(
    shipped: Path, tmp_path: Path, rows: list[Measurement]
) -> None:
    shipped.write_text("".join(f"{row.line()}\n" for row in rows[:5]))
    assert load() == rows[:5]
    with Store.open() as store:
        store.add(rows[5:])
    assert len(load("h200", "gemm", "graph")) == len(rows)
    assert load("b200") == []
    with pytest.raises(StoreError, match="there is no tuning database"):
        load(url=str(tmp_path / "missing.sqlite3"))


def test_a_long_history_costs_the_board_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = [row for row in real_rows.SHIPPED if row.entry == "gemm" and row.status == "passed"]
    path, runs = tmp_path / "long.sqlite3", 5_000 // len(newest) + 1
    with Store.open(path) as store:
        store.add(
            replace(row, run=f"run-{i}", created_at=f"2026-11-24T10:{i:02d}:00Z")
            for i in range(runs)
            for row in newest
        )
    read: list[object] = []
    from_row = database.from_row
    monkeypatch.setattr(database, "from_row", lambda row: read.append(row) or from_row(row))

    def seconds(where: Path) -> float:
        """Processor time of the board with the database ``where``, or without any."""
        monkeypatch.setenv("KERNELCAT_DB", str(where))
        start = time.process_time()
        assert CliRunner().invoke(main, ["leaderboard"]).exit_code == 0
        return time.process_time() - start

    seconds(tmp_path / "none")  # imports
    without, with_history = seconds(tmp_path / "none"), seconds(path)
    assert len(read) <= len(newest)
    assert with_history < 2 * without + 0.2
