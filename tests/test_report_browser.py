"""The page in a real browser, where a Chromium is installed: nothing loaded, no complaint, dark and light."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver
from report_helpers import Page
from run_helpers import ROOT

from tfbench import report

DEADLINE_S = 120
# No request of the browser itself leaves the machine either.
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars",
    "--enable-logging=stderr",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Browser:
    """A Chromium and the folder of its profile."""

    program: str
    profile: Path

    def run(self, path: Path, *options: str) -> tuple[str, list[str]]:
        """What it writes about a page, and what the page's console says."""
        done = subprocess.run(
            [self.program, *OPTIONS, f"--user-data-dir={self.profile}", *options, path.as_uri()],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser that can show a page here: some are packed so that they cannot read any folder."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "small.html").write_text("<p>it works</p>")
    found = Browser(program, folder / "profile")
    try:
        shown, _ = found.run(folder / "small.html", "--dump-dom")
    except subprocess.SubprocessError as error:
        pytest.skip(f"{program} shows no page here: {error}")
    if "it works" not in shown:
        pytest.skip(f"{program} shows no page of {folder}")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the committed rows."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(html=str(path)):
        assert report.report(["report", str(ROOT / "results" / "h200")]) == 0
    return path


@pytest.mark.parametrize(("scheme", "lightness"), [(0, (0, 40)), (1, (240, 255))], ids=["dark", "light"])
def test_page_is_drawn_in_both_schemes_without_a_complaint(browser, page, tmp_path, scheme, lightness):
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "page.png"
    _, console = browser.run(
        page,
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1000,1600",  # the rankings, their tables and the scaling curves
        f"--screenshot={picture}",
    )
    assert not console
    with image.open(picture) as found:
        colours = found.convert("RGB").getcolors(1 << 24)
    number, page_colour = max(colours)
    assert number > 1_000_000  # most of the picture is the page itself
    assert lightness[0] <= min(page_colour) <= max(page_colour) <= lightness[1]
    # Bars and lines are what has a strong colour: the bars alone are more than 15 × 1000 of it.
    assert sum(number for number, rgb in colours if max(rgb) - min(rgb) > 100) > 15_000


def test_browser_finds_every_picture(browser, page):
    shown, console = browser.run(page, "--dump-dom")
    assert not console
    assert len(Page(shown).all("figure")) == len(Page(page.read_text()).all("figure")) > 4
    assert len(Page(shown).all("td")) == len(Page(page.read_text()).all("td"))


@pytest.mark.parametrize(
    "addition",
    ['<img src="http://example.test/x.png">', "<script>document.title = 'ran'</script>"],
)
def test_page_lets_nothing_be_loaded_or_run(browser, page, tmp_path, addition):
    """Shows too that the tests above would see it."""
    changed = tmp_path / "changed.html"
    changed.write_text(page.read_text().replace("</main>", f"{addition}</main>"))
    shown, console = browser.run(changed, "--dump-dom")
    assert addition[:6] in shown
    assert "<title>tfbench report</title>" in shown
    (complaint,) = console
    assert "Content Security Policy" in complaint


def test_printing_keeps_tables_as_tables(browser, page, tmp_path):
    """Paper is as narrow as the screens where cells are stacked, which would take more pages."""
    stacked = tmp_path / "stacked.html"
    stacked.write_text(page.read_text().replace("@media screen and (max-width", "@media (max-width"))
    pages = []
    for path in (page, stacked):
        printed = tmp_path / f"{path.stem}.pdf"
        browser.run(path, f"--print-to-pdf={printed}")
        pages.append(printed.read_bytes().count(b"/Type /Page\n"))
    assert 0 < pages[0] < 0.8 * pages[1]
