"""The page in a real browser: what it shows, how soon, and that nothing from user code runs in it. `make browser`.

Reads   the page as a visitor sees it.
Writes  pictures for the guide, where OUTLIVE_PICTURES names a folder.
Never   anything but Debian's Chromium: without it, or without playwright, these tests are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard.program import HOSTILE
from dashboard.server_process import DEADLINE_S, Server, deliver, running, served
from deadlines import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.leaks_allowed]  # playwright keeps its driver's pipes until the end

PATIENCE_MS = DEADLINE_S * 1000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EXAMPLES = Path(__file__).parents[2] / "examples" / "seeing"
PICTURES = os.environ.get("OUTLIVE_PICTURES", "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; `make browser` installs it")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; `apt-get install chromium`, or `make browser` as root, installs it")
    with sync.sync_playwright() as playwright:
        # Without its sandbox: it refuses to run as root with it. The only page is ours.
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield opened
        opened.close()


class BrowserPage:
    """A page, and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: self.asked.append(request.url))


def visit(browser: Any, url: str, **more: Any) -> BrowserPage:
    page = browser.new_page(**{"viewport": {"width": 1000, "height": 900}, **more})
    page.set_default_timeout(PATIENCE_MS)
    seen = BrowserPage(page)
    page.goto(url)
    return seen


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def points(page: Any) -> int:
    """Of the plot that has the fewest."""
    return min((int(each.get_attribute("data-points") or 0) for each in page.locator(".plot").all()), default=0)


def picture(page: Any, name: str, **more: Any) -> None:
    """With few colours, those that are seen most: the guide's pictures stay small, and legends right."""
    import numpy
    from PIL import Image

    pixels = numpy.asarray(Image.open(io.BytesIO(page.screenshot(**more))).convert("RGB"))
    colours, places, counts = numpy.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    vivid = 1 + (colours.max(1).astype(int) - colours.min(1))  # a legend has few dots, letters have many shades of grey
    kept = colours[numpy.argsort(-counts * vivid)[:96]]
    nearest = ((colours[:, None].astype(int) - kept[None]) ** 2).sum(-1).argmin(1).astype(numpy.uint8)
    drawn = Image.fromarray(nearest[places.reshape(-1)].reshape(pixels.shape[:2]), "P")
    drawn.putpalette(kept.tobytes())
    drawn.save(Path(PICTURES) / f"{name}.png", optimize=True)


def test_a_death_is_on_the_page_when_it_has_happened(browser: Any, server: Server):
    """Before anything else happens in the job; then the plots, the incident, the keyboard, the phone and the dark."""
    with running("plain") as job:
        seen = visit(browser, server.link)
        page = seen.page
        page.wait_for_selector("article.job .findings > li")
        before = page.locator(".findings .title").all_inner_texts()
        deliver(job, 12)
        page.wait_for_selector("text=Sample 13 kills its worker")  # the job waits until it is told to go on
        # At once: other news may take its place later.
        spoken = wait_until(lambda: "Sample 13 kills its worker" in page.locator("#news").inner_text(), DEADLINE_S)

        def next_tick() -> bool:
            deliver(job, 1)
            return points(page) >= 3

        assert wait_until(next_tick, DEADLINE_S)
        lines = page.locator(".plot canvas").count()
        marks = page.locator(".summary", has_text="Died (✕): 2").count()
        page.fill(".quarantine input[type=search]", "null-pointer")
        found = page.locator(".quarantine tbody tr").all_inner_texts()
        page.locator(".quarantine tbody button").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] h3:has-text('Instruction and registers')")
        sections = page.locator("dialog h3").all_inner_texts()
        with page.expect_download() as download:
            page.click("dialog a:has-text('JSON')")
        kept = download.value.suggested_filename
        page.keyboard.press("Escape")
        closed = page.locator("dialog[open]").count()
        focused = page.evaluate("document.activeElement.closest('.quarantine') !== null")
        page.click("tbody button[data-what=recycle]")
        page.wait_for_selector("dialog[open] >> text=leaves after its next batch")
        page.keyboard.press("Escape")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#past summary")
        page.wait_for_selector("#past .run")
        phone = visit(browser, server.link, viewport={"width": 360, "height": 740}, color_scheme="dark")
        phone.page.wait_for_selector("text=Sample 13 kills its worker")
        small = fits(phone.page), phone.page.evaluate("document.documentElement.dataset.theme")

    assert "Sample 13 kills its worker" not in before
    assert lines >= 2
    assert marks == 1
    assert len(found) == 1
    assert found[0].startswith("13")
    assert {"What happened", "Python stacks", "Instruction and registers"} <= set(sections)
    assert kept.startswith("outlive-")
    assert closed == 0
    assert focused
    assert light != dark
    assert small == (True, "dark")
    assert spoken
    assert seen.wrong + phone.wrong == []
    assert all(url.startswith(server.url) for url in seen.asked)


def test_ranks_and_jobs_are_shown_side_by_side(browser: Any, server: Server):
    """Each in a card with its rank, ranks of a run first to last; one alone has the fault; a card can be put away."""
    with (
        running("plain", RANK="1", WORLD_SIZE="2") as second,
        running("plain"),
        running("plain", RANK="0", WORLD_SIZE="2"),
    ):
        seen = visit(browser, server.link, viewport={"width": 1900, "height": 900})
        page = seen.page
        page.wait_for_selector("article.job >> nth=2")
        deliver(second, 12)
        page.wait_for_selector("text=Sample 13 kills its worker")
        titles = page.locator("article h2").all_inner_texts()
        chips = page.locator("#chooser label").all_inner_texts()
        places = [card.bounding_box() for card in page.locator("article.job").all()]
        blamed = [card.locator("text=kills its worker").count() > 0 for card in page.locator("article.job").all()]
        trouble = page.locator("#chooser label.trouble").all_inner_texts()
        page.uncheck("#chooser label >> nth=2 >> input")
        page.wait_for_selector("article.job >> nth=2", state="detached")
        left = page.locator("article h2").all_inner_texts()

    assert [("rank 0 of 2" in each, "rank 1 of 2" in each) for each in titles] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert ["rank" in chip for chip in chips] == [True, True, False]
    assert len({place["y"] for place in places}) == 1
    assert places[0]["x"] < places[1]["x"] < places[2]["x"]
    assert blamed == [False, True, False]
    assert trouble == [chips[1]]
    assert left == titles[:2]
    assert seen.wrong == []


def test_a_loader_without_workers_is_shown_as_the_trainer(browser: Any, server: Server):
    """What the trainer has in hand and what was left out; no memory of workers, and nobody to recycle."""
    with running("here") as job:
        seen = visit(browser, server.link)
        page = seen.page
        deliver(job, 5)
        page.wait_for_selector("text=Sample 9 raises an exception")
        told = page.locator("li[data-kind=poison]").inner_text()
        headings = page.locator("article h3:visible").all_inner_texts()
        row = page.locator("tr", has_text="none: the trainer (pid").inner_text()
        recycle = page.locator("tbody button[data-what=recycle]").is_disabled()

    assert "none: with num_workers=0 the trainer loads its batches itself" in told
    assert "in batch 4 of epoch 0" in told
    assert {"What the trainer did when", "Now"} <= set(headings)
    assert "Memory of each worker" not in headings
    assert "the trainer's own work" in row
    assert recycle
    assert seen.wrong == []


def test_hostile_strings_do_nothing(browser: Any, server: Server):
    """Names of datasets, exceptions and files are text and nothing else, in the page, the dialog and the download."""
    with running("hostile") as job:
        seen = visit(browser, server.link)
        page = seen.page
        deliver(job, 12)
        page.wait_for_selector("text=kills its worker")
        page.wait_for_selector(".quarantine tbody tr:nth-child(2)")
        page.locator(".quarantine tbody button").last.click()
        page.wait_for_selector("dialog[open] h3:has-text('What happened')")
        shown = page.locator("dialog").inner_text()
        page.keyboard.press("Escape")
        page.click("#past summary")
        page.wait_for_selector("#past .run")
        name = page.locator("article h2").inner_text()
        title = page.title()
        injected = page.locator("main img, main script, dialog img, dialog script").count()
        ident = page.evaluate("document.querySelector('.findings .more').dataset.id")
        page.route("**/download", lambda route: route.fulfill(body=server.ask(f"/api/incidents/{ident}.html").body))
        page.goto(f"{server.url}download")
        downloaded = page.title()

    assert HOSTILE in name
    assert HOSTILE in shown
    assert title == "outlive"
    assert injected == 0
    assert "owned" != downloaded
    assert seen.wrong == []


def test_the_page_says_so_when_its_server_is_gone(browser: Any):
    """What stands there is how it was; it goes on when the server is back."""
    with served() as server:
        seen = visit(browser, server.link)
        seen.page.wait_for_selector("#link.live")
        seen.page.wait_for_selector("#nothing:visible")
        server.process.send_signal(signal.SIGINT)
        seen.page.wait_for_selector("#link.lost")

        assert "not connected" in seen.page.inner_text("#link")


WORDS = {
    "leak": (
        *("The memory of workers grows and grows", "leaves about", "(recycled ", "from the beginning"),
        *("recycled in time", "look for caches", "memory_limit="),
    ),
    "poison": (
        *("Sample 421 kills its worker", "(picture-0421.png)", "worker", "after it began, in batch 52 of epoch 0"),
        *("2 workers lost", "check what this sample hands"),
    ),
    "slow_disk": (
        *("The source of the samples is slow", "each takes a worker", "all 2 alike", "after it began"),
        *("the trainer waited", "before that", "num_workers="),
    ),
    "too_few_workers": (  # or, where other programs take the CPUs, what is then true
        *("Too few workers|Workers wait for a CPU", "worker 0", "from the beginning", "the trainer waited"),
        "num_workers=|other programs",
    ),
}
# Of jobs that end by themselves; all do for the guide's pictures: OUTLIVE_PICTURES=docs/guide/pictures makes these.
SECONDS = dict.fromkeys(WORDS, "30") if PICTURES else {"poison": "18", "slow_disk": "30"}
LONG = "300"  # the others: they are ended when all is said
POINTS = 20 if PICTURES else 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WORDS)
def test_the_page_answers_the_questions_of_a_newcomer(browser: Any, server: Server, name: str):
    """Which sample, which worker, since when, what it cost, what to change: for each run of examples/seeing."""
    seen = visit(browser, server.link, viewport={"width": 1000, "height": 900})
    page = seen.page
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="train-"))
        shutil.copy(EXAMPLES / f"{name}.py", folder)
        job = stack.enter_context(subprocess.Popen([sys.executable, f"{name}.py", SECONDS.get(name, LONG)], cwd=folder))
        stack.callback(job.terminate)
        page.wait_for_selector(f"text=/{WORDS[name][0]}/")
        assert wait_until(lambda: points(page) >= POINTS, DEADLINE_S)

        unsaid: list[str] = []

        def all_is_said() -> bool:
            told = page.locator(".found").inner_text()
            unsaid[:] = [word for word in WORDS[name] if not any(each in told for each in word.split("|"))]
            return not unsaid

        wait_until(all_is_said, DEADLINE_S)
        if PICTURES:
            picture(page, name, full_page=True)
        if name == "poison":
            page.click("li[data-kind=poison] .open-incident >> nth=0")
            page.wait_for_selector("dialog[open] h3:has-text('What happened')")
            if PICTURES:
                picture(page, "incident")
        if name == "leak":
            phone = visit(browser, server.link, viewport={"width": 360, "height": 740}, color_scheme="dark")
            assert wait_until(lambda: points(phone.page) >= POINTS, DEADLINE_S)
            if PICTURES:
                picture(phone.page, "phone", clip={"x": 0, "y": 0, "width": 360, "height": 1600}, full_page=True)
            assert fits(phone.page)
        if name not in SECONDS:
            job.terminate()
        job.wait(120)
        page.wait_for_selector("h3:has-text('What was going on')")
        kept = page.locator(".found .title").all_inner_texts()

    assert unsaid == []
    assert any(title.startswith(tuple(WORDS[name][0].split("|"))) for title in kept)  # also when it is over
    assert seen.wrong == []
