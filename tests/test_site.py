"""The static site: what it shows, that text is escaped, that links resolve, and its speed."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.cli import main
from kernelcat.report import grid, site
from kernelcat.report.site import plots, sources
from kernelcat.report.site.markup import filename
from kernelcat.report.techniques.index import every
from kernelcat.store import Measurement
from kernelcat.store.audits import Audit, AuditedProblem, AuditedTune
from kernelcat.store.model_results import ModelResult
from kernelcat.store.random_races import RandomRace, RandomRaces

ROW: dict[str, Any] = json.loads(Path(__file__).with_name("measurement.json").read_text())
PEER = {"language": "peer", "config": {}, "source": ""}


class Page(HTMLParser):
    """Tags, attributes and texts of a page; ``open`` are elements without an end."""

    VOID = ("meta", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(attribute))]


def timed(us: float, **changes: Any) -> Measurement:
    times = {"median_us": us, "ci_us": [us * 0.999, us * 1.001]}
    return Measurement.from_json(ROW | times | changes)


def write(folder: Path, rows: list[Measurement], **options: Any) -> list[Path]:
    return site.write(folder, site.pages(rows, **options))


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    done = CliRunner().invoke(main, ["leaderboard", "--html", str(folder)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(folder / "index.html")
    return folder


def test_there_is_a_page_for_each_entry_and_gpu(committed: Path) -> None:
    expected = {filename("entry", name) for name in catalog.names()}
    expected |= {"index.html", "numbers.html", "engine.html", "gpu-h200.html", "techniques.html"}
    assert expected <= {path.name for path in committed.iterdir()}


def test_links_resolve_and_pages_load_nothing(committed: Path) -> None:
    reached = set()
    for path in committed.iterdir():
        page = Page(path)
        assert page.open == []
        assert not page.values("src")
        ids = page.values("id")
        assert len(ids) == len(set(ids))
        for target in page.values("href"):
            if target.startswith("https:"):
                continue
            if target.startswith("#"):
                assert target[1:] in ids
            else:
                assert (committed / target).is_file(), target
                reached.add(target)
    # An entry without results has no line, but its techniques may be listed.
    assert {path.name for path in committed.iterdir()} - reached <= {
        filename("entry", name) for name in catalog.names() if not has_line(committed, name)
    }


def has_line(folder: Path, name: str) -> bool:
    return filename("entry", name) in (folder / "index.html").read_text(encoding="utf-8")


def test_every_plot_has_a_name_and_a_table_after_it(committed: Path) -> None:
    plots = 0
    for path in committed.iterdir():
        tags = Page(path).tags
        for i, (tag, attrs) in enumerate(tags):
            if tag == "svg":
                plots += 1
                assert attrs["role"] == "img" and attrs["aria-label"]
                assert any(later == "table" for later, _ in tags[i:])
    assert plots > 20


def test_the_overview_has_ratios_of_the_newest_run(tmp_path: Path) -> None:
    rows = [
        timed(200.0),
        timed(180.0, variant="cublas", **PEER),
        timed(220.0, variant="quack", **PEER),
    ]
    write(tmp_path, rows, is_current=lambda row: True)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    (line,) = re.findall(r"<tr><th scope=\"row\">.*?</tr>", text)
    assert re.findall(r">(\d\.\d\d)<", line) == ["0.90", "0.90", "0.90"]
    assert "verified" in line and "stale" not in line and ROW["created_at"][:10] in line
    entry = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    assert "Roofline" in entry and "over problem size" in entry and "Ladder" not in entry


def test_states_differ_in_words(tmp_path: Path) -> None:
    predicted = {"kind": "predicted", "ci_us": None, "samples": 0, "sm_clock_mhz": None,
                 "power_w": None, "temperature_c": None, "max_error": None,
                 "gpu": "b200"}  # fmt: skip
    rows = [timed(200.0), Measurement.from_json(ROW | predicted)]
    write(tmp_path, rows, compiled={("gemm", "h200"), ("gemm", "h100")}, is_current=lambda r: True)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    lines = re.findall(r"<tr><th scope=\"row\">.*?</tr>", text)
    states = ["predicted", "compiled", "verified"]  # b200, h100, h200
    assert [re.findall("verified|compiled|predicted", re.sub("<.*?>", "", x)) for x in lines] == [
        [state] for state in states
    ]


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '"><b>x</b>'])
def test_foreign_names_are_text(tmp_path: Path, evil: str) -> None:
    rows = [
        timed(10.0, problem_name=evil, config={"a": evil}),
        timed(20.0, problem_name=evil, variant="cublas", **PEER),
    ]
    written = write(tmp_path / "pages", rows, is_current=lambda row: True)
    assert {path.parent for path in written} == {tmp_path / "pages"}
    for path in written:
        page = Page(path)
        bold = [tag for tag, _ in page.tags if tag == "b"]
        assert len(bold) == 1 + sum(tag == "figure" for tag, _ in page.tags)
        assert [tag for tag, _ in page.tags].count("script") == 1


def test_the_time_to_write_many_problems_is_that_of_100_000_rows_in_a_minute(
    tmp_path: Path,
) -> None:
    size = ROW["problem"]
    rows = [timed(10.0 + i / 1000, problem=size | {"M": 16 + i}, problem_name=f"problem {i}")
            for i in range(10_000)]  # fmt: skip
    start = time.process_time()
    write(tmp_path, rows, is_current=lambda row: True)
    assert time.process_time() - start < 60 * len(rows) / 100_000
    assert (tmp_path / "entry-gemm.html").read_text(encoding="utf-8").count("<tr>") > 9_900


def with_samples(us: float, shares: tuple[float, ...], **changes: Any) -> Measurement:
    return timed(us, quantiles_us=[us * share for share in shares], **changes)


def test_samples_have_a_plot_and_a_table_and_old_rows_have_none(tmp_path: Path) -> None:
    old = timed(180.0, problem=ROW["problem"] | {"M": 64}, problem_name=None)
    rows = [with_samples(200.0, (0.99, 1.0, 1.03)), old,
            with_samples(210.0, (0.9, 1.0, 1.1), variant="quack", **PEER),
            with_samples(205.0, (1.0,), variant="cublas", **PEER)]  # fmt: skip
    write(tmp_path, rows, is_current=lambda row: True)
    text = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    found = text.partition("Distribution of the samples")[2]
    assert "Strips of 1 problems" in found and "cublas: 205 to 205" in found
    assert "quack" not in found.partition("</svg>")[0]
    assert ">198</td>" in found and ">1.030</td>" in found
    write(tmp_path, [old], is_current=lambda row: True)
    text = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    assert "Distribution of the samples" not in text


def test_the_winner_over_time_shows_problems_that_were_raced_twice(tmp_path: Path) -> None:
    def race(us: float, run: str, day: int, **changes: Any) -> list[Measurement]:
        when = {"run": run, "created_at": f"2026-11-{day}T10:00:00Z", **changes}
        return [timed(us, **when), timed(200.0, variant="cublas", **PEER, **when)]

    once = {"problem": ROW["problem"] | {"M": 64}, "problem_name": "once"}
    history = [*race(250.0, "first", 10), *race(190.0, "second", 12),
               *race(50.0, "guess", 13, kind="predicted", ci_us=None, samples=0)[:1]]  # fmt: skip
    rows = [*race(100.0, "third", 14), *race(100.0, "only", 14, **once)]
    write(tmp_path, rows, history=history, is_current=lambda row: True)
    text = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    found = re.split("<h2.*?>The winner over time", text)[1].partition("<h2")[0]
    assert re.findall(r"0\.80|1\.05|2\.00", found.partition("<tbody>")[2]) == [
        "0.80",
        "1.05",
        "2.00",
    ]
    assert "once" not in found and "guess" not in found
    write(tmp_path, rows, is_current=lambda row: True)
    text = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    assert "The winner over time" not in text


def test_the_page_of_the_engine_has_speeds_and_escapes_them(tmp_path: Path) -> None:
    rows = [{"engine": "kernelcat", "batch": 8, "context": 1024, "tokens_per_second": 2667.2,
             "step_ms": 3.0}]  # fmt: skip
    run = ModelResult(
        "h200", "<b>model", "bench <i>model", "2026-11-24", False,
        {"decoding": rows, "has_random_weights": True},
    )  # fmt: skip
    write(tmp_path, [timed(200.0)], engines=[run], is_current=lambda row: True)
    text = (tmp_path / "engine.html").read_text(encoding="utf-8")
    assert "<b>model" not in text and "<i>" not in text and "&lt;b&gt;model on <a" in text
    assert ">2,667</td>" in text and ">333</td>" in text
    assert 'href="engine.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    write(tmp_path / "without", [timed(200.0)], is_current=lambda row: True)
    assert "engine" not in (tmp_path / "without" / "index.html").read_text(encoding="utf-8")


def test_the_page_of_the_engine_has_fetches_and_prompts_beside_decoding(tmp_path: Path) -> None:
    fetch = {"num_tokens": 4096, "recomputed_ms": 69.62, "shared_ms": 8.91, "fetched_ms": 14.95,
             "speedup": 4.657, "num_bytes": 103_809_024, "bandwidth": 43.2e9}  # fmt: skip
    beside = {
        "engine": "<i>colocated", "idle_ms": {"p50": 5.98, "p99": 12.94},
        "loaded_ms": {"p50": 6.41, "p99": 42.68}, "prompt_ms": {"p50": 170.3}, "ratio": 3.298,
        "traffic": {"batch": 32, "context": 1024, "num_tokens": 2048, "prompt_tokens": 8192,
                    "rate": 4.0},
    }  # fmt: skip
    runs = [
        ModelResult("h200", "m", "bench --fetch", "2026-11-24", False, {"fetch": fetch}),
        ModelResult("h200x2-nvlink", "<b>m", "bench <u>", "2026-11-24", False,
                    {"interference": [beside]}),
    ]  # fmt: skip
    write(tmp_path, [timed(200.0)], engines=runs, is_current=lambda row: True)
    page = tmp_path / "engine.html"
    text = page.read_text(encoding="utf-8")
    assert not Page(page).open and "<i>" not in text and "<b>m" not in text and "<u>" not in text
    assert text.count('class="table"') == 2
    for cell in ("14.95", "69.62", "4.66", "8.91", "43.2", "5.98", "42.68", "3.30", "170.3"):
        assert f'<td class="n">{cell}</td>' in text
    assert "&lt;i&gt;colocated" in text
    write(tmp_path, [timed(200.0)], engines=runs[:1], is_current=lambda row: True)
    assert page.read_text(encoding="utf-8").count('class="table"') == 1


def test_the_committed_site_shows_runs_without_decoding(committed: Path) -> None:
    text = (committed / "engine.html").read_text(encoding="utf-8")
    assert "gpt-oss-20b on h100x2-nvlink" in text
    for title in ("A prefix from host memory", "Prompts and decoding on a GPU each"):
        assert f"<caption><span>{title}" in text


def test_the_committed_site_shows_the_winner_over_time(committed: Path) -> None:
    assert "Ratio to the fastest peer of each race" in (committed / "entry-gemm.html").read_text()


def test_a_site_into_nowhere_or_over_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in ("missing/pages", "file"):
        done = CliRunner().invoke(main, ["leaderboard", "--html", str(tmp_path / target)])
        assert done.exit_code == 1 and done.output.count("\n") == 1, done.output
    assert (tmp_path / "file").read_text() == "mine"


def test_a_receipt_that_holds_is_not_called_compiled(tmp_path: Path) -> None:
    pairs = {("gemm", "h200"), ("flashmla", "h200")}
    write(tmp_path, [], compiled=pairs, checked={("gemm", "h200")}, is_current=lambda row: True)
    text = (tmp_path / "gpu-h200.html").read_text(encoding="utf-8")
    lines = re.findall(r"<tr><th scope=\"row\">.*?</tr>", text)
    assert [re.findall("checked|compiled", re.sub("<.*?>", "", x)) for x in lines] == [
        ["compiled"], ["checked"],
    ]  # fmt: skip


def test_predictions_and_tunes_are_judged_on_the_site(committed: Path, tmp_path: Path) -> None:
    numbers = (committed / "numbers.html").read_text(encoding="utf-8")
    judged = numbers.partition("Predicted order on the h200")[2]
    assert '<th scope="row">gemm</th>' in judged and "Spearman" in judged
    assert "Predicted order against measured order" in (committed / "entry-gemm.html").read_text()
    tune = AuditedTune("halving", True, 9, 1.5, "gemm/cuda/<b>", us=10.0, regret=0.02)
    problem = AuditedProblem(ROW["problem"], "small", 20, 10, seconds=3.0, best="gemm/cuda/tma",
                             best_us=9.8, tunes=(replace(tune, compiled=False), tune))  # fmt: skip
    audit = Audit(
        "gemm", "h200", 9, ["halving"], {}, "graph", "burst", "2026-11-24", {}, (problem,)
    )
    write(tmp_path, [timed(200.0)], tunes=[audit], is_current=lambda row: True)
    for name in ("entry-gemm.html", "numbers.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "audit of tunes with 9 candidates" in text and ">2.0%</td>" in text
        assert "cuda/&lt;b&gt;" in text
    assert "audit of tunes" not in (tmp_path / "entry-lm_head.html").read_text(encoding="utf-8")


def test_each_technique_has_a_line_a_part_and_links_to_the_entries_that_use_it(
    committed: Path,
) -> None:
    page = Page(committed / "techniques.html")
    ids, links = page.values("id"), page.values("href")
    for each in every():
        assert f"technique-{each.slug}" in ids and f"#technique-{each.slug}" in links
    assert "entry-multicast_gemm.html" in links


def test_parts_of_a_long_page_are_listed_at_its_beginning(committed: Path) -> None:
    text = (committed / "entry-gemm.html").read_text(encoding="utf-8")
    heads = re.findall('<h2 id="(part-[0-9]+)">', text)
    assert len(heads) > 5 and re.findall('href="#(part-[0-9]+)"', text) == heads
    assert text.index('aria-label="On this page"') < text.index("<h2")


def test_a_gpu_page_names_the_software_that_measured(tmp_path: Path) -> None:
    software = {
        "driver": "580.1",
        "cuda": "13.7",
        "compilers": {"nvrtc": "13.0.88", "triton": "none"},
    }
    write(tmp_path, [timed(200.0, environment=software)], is_current=lambda row: True)
    text = (tmp_path / "gpu-h200.html").read_text(encoding="utf-8")
    assert (
        '580.1</th><td>13.7</td><td></td><td><span class="wide">nvrtc 13.0.88</span></td>' in text
    )
    write(tmp_path, [timed(200.0, environment={})], is_current=lambda row: True)
    assert "Measured with" in (tmp_path / "gpu-h200.html").read_text(encoding="utf-8")


def test_committed_entries_without_a_race_are_checked(committed: Path) -> None:
    text = (committed / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<td><span class="state checked">\u25c7<span class="name"> checked<', text)


def test_little_is_not_called_nothing_and_long_numbers_are_powers_of_ten(tmp_path: Path) -> None:
    assert [grid.ratio(value) for value in (None, 0.0049, 0.005, 1.0)] == [
        "", "<0.01", "0.01", "1.00",
    ]  # fmt: skip
    assert [grid.percent(value) for value in (None, 0.0, 0.004, 0.5)] == ["", "0%", "<1%", "50%"]
    marks = [plots.Point(2e-6, 30.0, "small", True), plots.Point(3e4, 1.0, "large", True)]
    plot = plots.points("Plot", "x", "y", marks, y_base=2)
    for words in ("10\u207b\u2076", "0.0001", "10000", "10\u2075", ">32<"):
        assert words in plot
    assert "e-0" not in plot and "100000" not in plot


def test_random_races_have_plots_a_table_and_regret(tmp_path: Path) -> None:
    problem = {**ROW["problem"], "M": 64}
    races = [
        RandomRace(0, problem, "gemm/cuda/wgmma", {}, "nearest", us=5.0, peers={"cublas": 10.0},
                   tuned="gemm/cuda/tma", tuned_us=4.0),
        RandomRace(1, problem | {"M": 65}, failed="<b>out of memory</b>"),
    ]  # fmt: skip
    drawn = RandomRaces("gemm", "h200", "a" * 40, "graph", "burst", "2026-11-20T09:30:12Z", {},
                        tuple(races))  # fmt: skip
    write(tmp_path, [], random=[drawn], is_current=lambda row: True)
    text = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    assert "regret 25.0%" in text and "number 0: 1.25\u00d7" in text and "number 0: 2.00" in text
    assert "<b>out of memory" not in text and "out of memory" in text
    assert "Random problems" not in (tmp_path / "entry-flashmla.html").read_text(encoding="utf-8")


def test_sources_link_to_the_project_that_the_package_names(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (committed / "entry-gemm.html").read_text(encoding="utf-8")
    assert "<code>kernels/cuda/gemm" in page and "cuda/naive</th>" in page
    named = Message()
    named["Project-URL"] = "Source, https://code.example/kernelcat/"
    monkeypatch.setattr(sources.metadata, "metadata", lambda name: named)
    sources.project_url.cache_clear()
    write(tmp_path, [], is_current=lambda row: True)
    sources.project_url.cache_clear()
    page = (tmp_path / "entry-gemm.html").read_text(encoding="utf-8")
    assert 'href="https://code.example/kernelcat/blob/HEAD/reference/gemm.py"' in page
