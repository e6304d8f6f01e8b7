"""The site in a headless Chromium, by clicks and keys, on a phone and on a desktop.

Without a browser these tests are skipped; ``.ci/run`` sets a variable with which they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from kernelcat.cli import main
from kernelcat.report.site import Results, pages, serve, write
from kernelcat.store import shipped

REQUIRED = "KERNELCAT_BROWSER"
"""With the value ``required``, a test that finds no browser fails."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    done = CliRunner().invoke(main, ["leaderboard", "--html", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def no_browser(why: str) -> NoReturn:
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright import sync_api as playwright
    except ImportError:
        no_browser("needs playwright")
    if CHROMIUM is None:
        no_browser("needs Chromium")
    with playwright.sync_playwright() as api:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = api.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(params=[390, 1440])
def page(browser: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((folder / "index.html").as_uri())
    yield page
    page.close()
    assert problems == []


def test_no_page_is_wider_than_the_screen(page: Any, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        page.goto(path.as_uri())
        page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"], path.name


def test_clicks_sort_and_the_address_holds_the_state(page: Any) -> None:
    page.get_by_role("button", name="mean", exact=True).click()

    def means() -> list[float]:
        cells = page.locator("#board tbody td:nth-child(3)").all_text_contents()
        return [float(cell) for cell in cells if cell]

    assert len(means()) > 5 and means() == sorted(means(), reverse=True)
    page.reload()
    assert means() == sorted(means(), reverse=True)
    page.get_by_role("button", name="mean", exact=True).press("Enter")
    assert means() == sorted(means())


def test_a_filter_hides_rows_and_a_link_restores_it(page: Any) -> None:
    page.get_by_role("searchbox").fill("multicast_gemm")
    assert page.locator("#board tbody tr:visible").count() == 1
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.locator("#board tbody tr:visible").count() == 1
    page.get_by_role("link", name="multicast_gemm").click()
    assert page.get_by_role("heading", level=1).text_content() == "multicast_gemm"
    assert page.get_by_role("img").count() > 0


def test_clicks_lead_through_all_kinds_of_pages(page: Any) -> None:
    heading = page.get_by_role("heading", level=1)
    page.get_by_role("link", name="h200").first.click()
    assert heading.text_content() == "NVIDIA H200 (h200)"
    assert page.get_by_role("img").is_visible()
    page.get_by_role("link", name="rms_norm", exact=True).click()
    assert heading.text_content() == "rms_norm"
    assert page.get_by_role("table").count() > 1
    page.get_by_role("link", name="How numbers are made").click()
    assert heading.text_content() == "How numbers are made"
    page.get_by_role("link", name="Overview").click()
    assert page.locator("#board tbody tr:visible").count() > 20


def test_links_and_filters_open_what_is_folded(page: Any, folder: Path) -> None:
    page.goto((folder / "techniques.html").as_uri())
    page.get_by_role("searchbox").fill("TMA multicast")
    page.get_by_role("link", name="TMA multicast", exact=True).click()
    part = page.locator("details#technique-tma-multicast")
    part.get_by_text("Source:").wait_for(state="visible")
    page.goto((folder / "entry-gemm.html").as_uri() + "#history0.q=4096")
    page.locator("#history0").wait_for(state="visible")
    page.get_by_role("link", name="Sources", exact=True).click()
    assert page.locator("#history0").get_by_role("searchbox").input_value() == "4096"


def test_keys_reach_the_content_the_filter_and_the_table(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("searchbox").focus()
    page.keyboard.type("moe")
    shown = page.locator("#board tbody tr:visible")
    assert 0 < shown.count() < 10
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    names = [name.split()[0] for name in shown.locator("th").all_text_contents()]
    assert names == sorted(names, reverse=True)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of two entries whose rows have samples, made up around their medians."""
    rows = [
        replace(row, quantiles_us=tuple(row.median_us * share for share in (0.99, 1.0, 1.02)))
        for row in shipped()
        if row.median_us and row.kind == "measured" and row.entry in ("gemm", "nvfp4_matmul")
    ]
    return write(tmp_path_factory.mktemp("sampled"), pages(rows))[0].parent


def test_every_plot_fits_the_screen_and_its_texts_do_not_leave_it(
    page: Any, folder: Path, sampled: Path
) -> None:
    with_samples = [sampled / name for name in ("entry-gemm.html", "entry-nvfp4_matmul.html")]
    for path in with_samples:
        assert "Distribution of the samples" in path.read_text(encoding="utf-8")
    names = ("entry-gemm.html", "entry-moe_mlp.html", "gpu-h200.html")
    for path in (*(folder / name for name in names), *with_samples):
        page.goto(path.as_uri())
        cut = page.evaluate("""() => [...document.querySelectorAll("svg")].flatMap((svg) => {
          const frame = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text, rect, circle")].filter((part) => {
            const box = part.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > Math.min(frame.right, innerWidth) + 1;
          }).map((part) => part.textContent || part.outerHTML);
        })""")
        assert cut == [], path
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"], path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast_in_light_and_dark(page: Any, folder: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto((folder / "gpu-h200.html").as_uri())
    for selector in ("h1", "main > p", "figcaption", "tbody a", "svg text"):
        ratio = page.evaluate(CONTRAST, selector)
        assert ratio >= 4.5, selector


CONTRAST = """(selector) => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector), style = getComputedStyle(element);
  const ink = light(element.closest("svg") ? style.fill : style.color);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}"""
"""The contrast of the first such element with the page, by the formula of WCAG 2."""


def test_the_served_site_filters_under_its_security_policy(browser: Any) -> None:
    with serve.Site(Results(), 0) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        page = browser.new_page()
        try:
            page.goto(site.url)
            page.get_by_role("searchbox").fill("multicast_gemm")
            assert page.locator("#board tbody tr:visible").count() == 1
        finally:
            page.close()
            site.shutdown()
            thread.join()


def test_a_missing_browser_skips_here_and_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception):
        no_browser("needs Chromium")
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception):
        no_browser("needs Chromium")


def test_ci_installs_a_missing_browser_and_requires_it(tmp_path: Path) -> None:
    run = Path(__file__).parents[1] / ".ci" / "run"
    for name, line in (("make", f'echo "make $1 ${REQUIRED}"'), ("apt-get", 'echo "apt-get $*"'),
                       ("sudo", 'shift; "$@"'), ("id", "echo 0")):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))

    def lines() -> list[str]:
        done = subprocess.run(["bash", str(run)], capture_output=True, text=True, check=True,
                              env={"PATH": str(tmp_path)})  # fmt: skip
        return done.stdout.splitlines()

    *installs, last = lines()
    assert last == "make test required" and installs[-1].endswith(" chromium")
    (tmp_path / "chromium").symlink_to(tmp_path / "make")
    assert lines() == ["make test required"]
