"""The site in a headless Chromium, by clicks, on a phone and on a desktop."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelcat.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    done = CliRunner().invoke(main, ["leaderboard", "--html", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
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
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"], path.name


def test_clicks_sort_and_the_address_holds_the_state(page: Any) -> None:
    page.get_by_role("button", name="mean", exact=True).click()

    def means() -> list[float]:
        cells = page.locator("#board tbody td:nth-child(4)").all_text_contents()
        return [float(cell) for cell in cells if cell]

    assert len(means()) > 5 and means() == sorted(means(), reverse=True)
    page.reload()
    assert means() == sorted(means(), reverse=True)
    page.get_by_role("button", name="mean", exact=True).press("Enter")
    assert means() == sorted(means())


def test_a_filter_hides_rows_and_a_link_restores_it(page: Any) -> None:
    page.get_by_role("searchbox").fill("fp8_gemm")
    assert page.locator("#board tbody tr:visible").count() == 1
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.locator("#board tbody tr:visible").count() == 1
    page.get_by_role("link", name="fp8_gemm").click()
    assert page.get_by_role("heading", level=1).text_content() == "fp8_gemm"
    assert page.get_by_role("img").count() > 0
