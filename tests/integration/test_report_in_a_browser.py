import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from browser import browse, find_browser
from PIL import Image

from kvlab.report import write_report

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FIGURES, MEASURED = ROOT / "figures", ROOT / "data" / "measured"
BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium; on Debian: apt install chromium")

IMAGES = """Array.from(document.images, image => {
  const box = image.getBoundingClientRect();
  return [image.alt, image.complete, image.naturalWidth, box.width, box.height, box.right <= innerWidth];
})"""
PAGE = "document.documentElement.scrollWidth"
# On a screen wide tables scroll, on paper they cannot.
TABLE = "Math.max(...Array.from(document.querySelectorAll('table'), table => table.getBoundingClientRect().right))"
TABLES = "Array.from(document.querySelectorAll('table'), table => table.rows.length)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browse(BROWSER, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def report_page(tmp_path_factory):
    """The report of this project's own figures."""
    folder = tmp_path_factory.mktemp("report")
    write_report([FIGURES], folder / "report.html")
    return folder / "report.html"


@needs_browser
def test_every_figure_and_table_is_there_and_nothing_is_asked_for(browser, report_page):
    browser.open(report_page.as_uri())
    images = browser.value(IMAGES)
    assert len(images) == len(list(FIGURES.glob("*.svg"))) > 0
    for name, complete, natural, width, height, inside in images:
        assert complete and natural > 0 and width > 300 and height > 100 and inside, name
    # Those of the summary besides.
    rows = browser.value(TABLES)
    assert len(rows) >= len(list(FIGURES.glob("*.csv"))) and min(rows) > 1
    elsewhere = [url for url in browser.requests if not url.startswith("data:")]
    assert elsewhere == [report_page.as_uri()]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_screenshot_is_not_blank_and_follows_light_and_dark(browser, report_page, scheme):
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(report_page.as_uri())
    pixels = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("L"))
    assert pixels.shape[0] > 2000
    background = pixels[0, 0]
    assert background > 200 if scheme == "light" else background < 60
    # Text and figures: some of it is neither background nor nearly so.
    written = np.abs(pixels.astype(int) - background) > 60
    assert 0.01 < written.mean() < 0.9
    # No stretch of a thousand rows is empty.
    assert np.convolve(written.any(axis=1), np.ones(1000), "valid").min() > 0


@needs_browser
@pytest.mark.parametrize(
    ("media", "width", "widest"), [("screen", 400, PAGE), ("screen", 1600, PAGE), ("print", 700, TABLE)]
)
def test_nothing_is_wider_than_the_window_or_the_paper(browser, tmp_path, media, width, widest):
    out = tmp_path / "report.html"
    # With columns of commands and versions, the widest that there are.
    write_report([FIGURES, MEASURED], out)
    browser.ask("Emulation.setEmulatedMedia", media=media)
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(out.as_uri())
    assert browser.value(widest) <= width
    browser.ask("Emulation.clearDeviceMetricsOverride")
    browser.ask("Emulation.setEmulatedMedia", media="")


@needs_browser
def test_these_tests_would_notice_a_request_and_a_missing_figure(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<img alt="away" src="http://127.0.0.1:9/x.png"><img alt="beside" src="beside.png">')
    browser.open(page.as_uri())
    assert {"http://127.0.0.1:9/x.png", (tmp_path / "beside.png").as_uri()} <= set(browser.requests)
    assert [natural for _, _, natural, *_ in browser.value(IMAGES)] == [0, 0]


@needs_browser
def test_scripts_of_files_do_not_run_and_links_to_sections_work(browser, tmp_path):
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"><script>top.ran = 1</script>{}</svg>'
    (tmp_path / "a.svg").write_text(svg.format('<image href="http://127.0.0.1:9/x.png" width="9" height="9"/>'))
    (tmp_path / "b.md").write_text("<script>window.ran = 1</script>\n\n[x](javascript:window.ran=1)")
    shutil.copy(FIGURES / "loss.csv", tmp_path)
    out = tmp_path / "report.html"
    write_report([tmp_path], out)
    browser.open(out.as_uri())
    assert browser.value("typeof window.ran") == "undefined"
    assert [url for url in browser.requests if not url.startswith("data:")] == [out.as_uri()]
    heads = "Array.from(document.querySelectorAll('nav a'), a => document.querySelector(a.hash + ' h2').innerText)"
    assert browser.value(heads) == ["b", "a", "loss"]
