"""The report in a real browser: it fits a phone and a desk, and loads nothing."""

from __future__ import annotations

import contextlib
import html as entities
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serving.studies.report import write_comparison, write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
WITHIN_S = 50
# The page tells its frame, which is as wide as asked: a window cannot be as narrow as a phone.
PROBE = """<script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".scroll")];
  const svgs = [...document.querySelectorAll("svg")];
  parent.postMessage(JSON.stringify({
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
    scrolling: boxes.filter((box) => box.scrollWidth > box.clientWidth).length,
    drawn: Math.max(...svgs.map((svg) => svg.getBoundingClientRect().right)),
    loaded: performance.getEntriesByType("resource").length,
  }), "*");
});</script></body>"""
FRAME = """<!doctype html><body style="margin:0">
<iframe src="page.html" style="border:0;width:{width}px;height:2000px"></iframe><pre></pre>
<script>addEventListener("message", (e) => document.querySelector("pre").textContent = e.data)
</script></body>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")


@pytest.fixture(scope="module")
def pages(
    folder: Path, other_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("compared") / "compare.html"
    return {
        "report": write_report(folder)[0],
        "comparison": write_comparison(folder, other_folder, out),
    }


def browse(file: Path, *arguments: str) -> str:
    """What a headless browser prints about `file`; every process of it is ended."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"]
    command += [
        "--no-first-run",
        "--disable-component-update",
        f"--user-data-dir={file.parent / 'profile'}",
    ]
    command += [*arguments, file.as_uri()]
    browser = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        return browser.communicate(timeout=WITHIN_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def measured(page: Path, width: int, folder: Path) -> dict[str, Any]:
    probed = page.read_text(encoding="utf-8").replace("</body>", PROBE)
    (folder / "page.html").write_text(probed, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    found = re.search(
        r"<pre>(.+?)</pre>", browse(frame, "--virtual-time-budget=3000", "--dump-dom")
    )
    assert found, "the page said nothing"
    told: dict[str, Any] = json.loads(entities.unescape(found[1]))
    return told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("width", [375, 1280])
def test_a_page_is_no_wider_than_its_window_and_loads_nothing(
    name: str, width: int, pages: dict[str, Path], tmp_path: Path
) -> None:
    told = measured(pages[name], width, tmp_path)
    assert told["width"] == width
    assert told["needed"] <= width
    assert told["drawn"] <= width
    assert told["loaded"] == 0
    if width == 375:
        assert told["scrolling"] > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [500, 1280])
def test_a_screenshot_shows_paper_ink_and_colours(
    width: int, pages: dict[str, Path], tmp_path: Path
) -> None:
    images = pytest.importorskip("PIL.Image")
    page = shutil.copy(pages["report"], tmp_path / "report.html")
    picture = tmp_path / f"{width}.png"
    browse(page, f"--window-size={width},2400", f"--screenshot={picture}")
    with images.open(picture) as image:
        assert image.size == (width, 2400)
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=2**24)}
    assert {(0xFD, 0xFC, 0xFA), (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours
