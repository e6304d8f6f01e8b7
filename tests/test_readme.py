"""README.md and the pages in docs/ that are made show the committed results and receipts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelcat import catalog
from kernelcat.report import documents, entry_page, picture, summary, support
from kernelcat.report.readme import render_readme
from kernelcat.store import Measurement, shipped

ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"


def test_the_readme_is_what_make_readme_writes() -> None:
    text = README.read_text(encoding="utf-8")
    fresh = support.fill(render_readme(text, shipped()))
    assert fresh == text, "run make readme"


def test_the_pages_are_what_make_readme_writes() -> None:
    fresh = documents.documents(DOCS)
    stale = [path.name for path, text in fresh.items() if path.read_text("utf-8") != text]
    assert not stale, "run make readme"
    for folder in ("entries", "results"):
        assert set((DOCS / folder).iterdir()) == {p for p in fresh if p.parent == DOCS / folder}


def test_the_test_command_is_in_the_readme() -> None:
    assert "make test" in README.read_text() and "make demo" in README.read_text()


def test_the_readme_fits_on_one_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_update_writes_pages_that_are_missing_and_keeps_what_people_wrote(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- summary:h200 -->\n<!-- /summary -->\n")
    for folder in ("entries", "results"):
        (tmp_path / "docs" / folder).mkdir(parents=True)
    (tmp_path / "docs" / "entries" / "README.md").write_text(
        "<!-- entries -->\n<!-- /entries -->\n"
    )
    written = tmp_path / "docs" / "results" / "gemm.md"
    written.write_text("Written by hand.\n<!-- results:gemm -->\n<!-- /results -->\n")
    documents.update(tmp_path / "README.md")
    assert written.read_text().startswith("Written by hand.\n<!-- results:gemm -->\n## NVIDIA H")
    assert (tmp_path / "docs" / "results" / "tma_copy.md").read_text().startswith("# Results of")
    assert "| [`gemm`](docs/entries/gemm.md) |" in (tmp_path / "README.md").read_text()


@pytest.fixture
def rows() -> list[Measurement]:
    """Shipped rows of one entry and GPU, in whose races a peer ran."""
    return [row for row in shipped() if (row.entry, row.gpu) == ("gemm", "h200")]


def test_a_summary_compares_winners_with_the_fastest_peers(rows: list[Measurement]) -> None:
    (gemm,) = [each for each in summary.summaries(rows, "h200") if each.entry == "gemm"]
    titles = [row.problem_name or str(row.to_problem()) for row in rows]
    hot = {title for row, title in zip(rows, titles, strict=True) if row.state == "sustained"}
    races = {}
    for row, title in zip(rows, titles, strict=True):
        state = "sustained" if title in hot else "burst"
        if (row.state, row.regime, row.status) == (state, "graph", "passed"):
            races.setdefault(title, []).append(row)
    races = {name: of_name for name, of_name in races.items()
             if any(row.language == "peer" for row in of_name)}  # fmt: skip
    assert set(gemm.ratios) == set(races)
    for name, ratio in gemm.ratios.items():
        times = [r.median_us for r in races[name] if r.language == "peer"]
        assert min(times) / ratio in [
            pytest.approx(r.median_us) for r in races[name] if r.language != "peer"
        ]
    assert min(gemm.ratios.values()) < gemm.mean < max(gemm.ratios.values())


def test_unfinished_entries_have_no_results_in_table_and_picture() -> None:
    table, drawn = summary.markdown(shipped(), "h200"), picture.to_svg(shipped(), "h200")
    for name in catalog.names():
        is_complete = not catalog.entry(name).work_in_progress
        assert (f"docs/results/{name}.md" in table) == is_complete
        assert f"[`{name}`](docs/entries/{name}.md)" in table
        assert is_complete or f">{name}<" not in drawn


def test_an_entry_that_a_gpu_has_not_raced_shows_another_ones_results() -> None:
    lines = summary.markdown(shipped(), "h200").splitlines()
    (line,) = [line for line in lines if "`moe_combine`" in line]
    assert "** on h100x2-nvlink |" in line and "nccl-all-to-all" in line
    assert not any(" on h100" in line for line in lines if "`gemm`" in line)
    assert "moe_combine" not in picture.to_svg(shipped(), "h200")


def test_the_picture_has_a_mark_for_each_ratio(rows: list[Measurement]) -> None:
    (gemm,) = [each for each in summary.summaries(rows, "h200") if each.ratios]
    drawn = picture.to_svg(rows, "h200")
    legend = 2
    assert drawn.count("<circle") + drawn.count("<path") == len(gemm.ratios) + legend
    slower = sum(ratio < 1 for ratio in gemm.ratios.values())
    assert drawn.count('fill="none"') == slower + 1


def test_a_page_of_an_entry_has_the_messages_that_calls_get() -> None:
    page = entry_page.markdown("paged_attn")
    assert "`paged_attn: heads=31 must be a multiple of kv_heads=8`" in page
    assert "`paged_attn: q is complex64; use one of: bfloat16, float16`" in page
    assert "| `k_scale` | (1 or pages, kv_heads) | float32 |" in page
    assert "| `max_q` | keyword | below 2^31 | 1 |" in page
    assert "only where kv_dtype is float4_e2m1fn_x2" in page
    assert "../../reference/_sequences.py" in page
