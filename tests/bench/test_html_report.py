"""`tandem bench --html`: one file that shows everything, asks nothing of the network, and takes names for text.

`python -m tests.bench.test_html_report RESULT.json [OLDER.json]` makes the pictures in docs/images from such results.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tandem.bench.html_report import page as page_of
from tandem.bench.html_report import write_html
from tandem.bench.result import BenchResult
from tests.bench.data import LAUNCHES, result
from tests.server.browsers import browser, wait_until
from tests.server.servers import PATIENCE

__all__ = ["browser"]
IMAGES = Path(__file__).parents[2] / "docs" / "images"
LOOKS = (("desktop", 1240, "light"), ("desktop", 1240, "dark"), ("phone", 390, "light"))
TALLEST = 2400  # pixels of the picture of a phone
SCRIPT = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
ROWS, ROUNDS = 8, 7
OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].filter(t => !t.getAttribute('transform'))
        .map(t => [t.textContent, t.getBoundingClientRect()]);
    const beside = (p, q) => p.left + 1 >= q.right || q.left + 1 >= p.right;
    const apart = (p, q) => beside(p, q) || p.top + 3 >= q.bottom || q.top + 3 >= p.bottom;
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) => !apart(p, q))
        .map(([b]) => `${svg.getAttribute('aria-label')}: ${a} / ${b}`));
})"""
DRAWN = "[...document.querySelectorAll('.plot svg')].every(s => s.viewBox.baseVal.width === s.parentNode.clientWidth)"
OUTSIDE = """() => [...document.querySelectorAll('svg text')].filter(t => {
    const box = t.getBoundingClientRect();
    return box.left < 0 || box.right > innerWidth;
}).map(t => t.textContent)"""


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def page(browser: Browser, problems: list[str]) -> Iterator[Page]:
    """Nothing may fail in it, and it may ask for nothing but the file."""
    context = browser.new_context(viewport={"width": 1240, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE * 1e3)
    opened = context.new_page()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda r: problems.append(r.url) if not r.url.endswith("/out.html") else None)
    yield opened
    assert not problems
    context.close()


def show(page: Page, folder: Path, found: BenchResult, older: BenchResult | None = None) -> None:
    write_html(folder / "out.html", found, older)
    page.goto((folder / "out.html").as_uri())


def counted(page: Page, selector: str) -> int:
    return page.locator(selector).count()


def test_every_plot_has_its_dots(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, result(peer=True), result(seed=1, speed=0.93))
    assert counted(page, "#roofline circle.dot") == ROWS * len(LAUNCHES)  # every kernel of every profile
    assert counted(page, "#roofline path.whole") == ROWS
    assert counted(page, "#roofline path.limit") == 1
    assert page.locator("#roofline").get_by_text("memory: 32.5 GB/s").is_visible()
    assert page.locator("#roofline").get_by_text("arithmetic: 920 GOP/s").is_visible()
    assert counted(page, "#batch circle.dot") == 2 * 6  # decoding, now and before
    assert counted(page, "#depth circle.dot") == ROWS
    assert counted(page, "#launches rect.launch") == ROWS * len(LAUNCHES)
    assert counted(page, "#rounds circle.dot") == ROWS * ROUNDS
    assert counted(page, "#rounds rect.interval") == ROWS
    assert (
        counted(page, "#rounds circle.outlier") == sum(len(row["outliers"]) for row in result()["rows"]) > 0
    )
    assert counted(page, "#latency rect.bin") > 100 and counted(page, "#latency circle.outlier") > 0
    assert counted(page, "#latency path.mark") == 3 * ROWS
    assert counted(page, "#older circle.dot") == ROWS and counted(page, "#peer circle.dot") == 2
    assert page.locator("#older").get_by_text("faster").count() == ROWS
    assert counted(page, "#figures tbody tr") == ROWS
    page.locator("#roofline").get_by_role("button", name="decode 64, batch 8", exact=True).click()
    assert counted(page, "#roofline circle.dot") == len(LAUNCHES)


def test_texts_keep_apart_at_any_width(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, result(peer=True), result(seed=1, speed=0.93))
    for width in (1240, 700, 390):
        page.set_viewport_size({"width": width, "height": 900})
        wait_until(page, DRAWN)
        assert page.evaluate(OVERLAPS) == []
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_both_schemes_have_their_colours(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, result())
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(shade) != light


def test_pointing_at_a_dot_tells_what_it_is(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, result())
    page.locator("#batch circle.dot").last.hover()
    tip = page.locator("#tip")
    assert "decode 64, batch 32 at 4096" in tip.inner_text() and "of the limit" in tip.inner_text()


def test_a_small_run_is_shown_too(page: Page, tmp_path: Path) -> None:
    """Nothing profiled, one row, no limit of arithmetic, rounds all alike."""
    found = result()
    found["rows"], found["profiles"], found["notes"] = [found["rows"][1]], {}, []
    found["limits"]["ops_per_s"] = found["limits"]["ops_from"] = None
    found["rows"][0] |= {"samples": [100.0], "interval": (100.0, 100.0), "outliers": [], "step_seconds": []}
    show(page, tmp_path, found)
    assert counted(page, "#roofline path.whole") == 1 and counted(page, "#roofline circle.dot") == 0
    assert counted(page, "#rounds circle.dot") == 1 and counted(page, "#depth circle.dot") == 1
    assert not counted(page, "#launches, #latency, #older, #batch")
    assert not re.search("NaN|Infinity|undefined", page.locator("main").inner_html())


def test_launches_that_no_clock_saw_stay_in_the_picture(page: Page, tmp_path: Path) -> None:
    found = result()
    found["profiles"]["prefill 512"][3]["seconds"] = 0.0
    show(page, tmp_path, found)
    assert counted(page, "#roofline circle.dot") == ROWS * len(LAUNCHES)
    assert not re.search("NaN|Infinity", page.locator("main").inner_html())


def test_what_is_not_valid_says_so(page: Page, tmp_path: Path) -> None:
    found = result()
    found["rows"][0] |= {"valid": False, "why": "it is above the roofline", "of_roofline": 1.4}
    show(page, tmp_path, found)
    assert "prefill 512 is not valid: it is above the roofline" in page.locator("#invalid").inner_text()
    assert counted(page, "#figures tr.invalid") == 1


def test_names_are_text(page: Page, tmp_path: Path) -> None:
    found = result(model=SCRIPT, peer=True)
    found["command"] = found["device"] = found["machine"]["cpu"] = found["limits"]["bytes_from"] = SCRIPT
    found["notes"] = found["rows"][0]["warnings"] = [SCRIPT]
    found["rows"][0]["label"] = SCRIPT
    found["profiles"] = {SCRIPT: found["profiles"]["prefill 512"]}
    found["profiles"][SCRIPT][0] |= {"kernel": SCRIPT, "name": SCRIPT}
    assert found["peer"]
    found["peer"] |= {"name": SCRIPT, "build": SCRIPT}
    show(page, tmp_path, found, found)
    assert page.locator("h1").inner_text() == SCRIPT
    assert page.title() == f"{SCRIPT}: tandem bench"
    assert page.evaluate("window.hacked") is None
    assert counted(page, "img") == 0 and counted(page, "script") == 2


@pytest.mark.fast
def test_the_file_names_no_other_host() -> None:
    text = page_of(result(peer=True), result(seed=1))
    # A name, not an address.
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "$" not in re.sub(r"\$\{", "", text).replace("$1", "")
    assert "default-src 'none'" in text


def main() -> None:
    found, *older = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, width, scheme in LOOKS:
            page = browser.new_page(
                viewport={"width": width, "height": 900}, device_scale_factor=1 + (width < 500)
            )
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            show(page, Path(folder), found, older[0] if older else None)
            part = {"x": 0, "y": 0, "width": width, "height": TALLEST} if width < 500 else None
            page.screenshot(path=IMAGES / f"bench-{name}-{scheme}.png", full_page=True, clip=part)


if __name__ == "__main__":
    main()
