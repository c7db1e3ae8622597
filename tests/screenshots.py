"""Takes the pictures of the page for service/README.md, from the bundled checkpoint: python -m tests.screenshots"""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from service.settings import BUNDLED
from tests.helpers import RunningServer
from tests.toolbox.needs import find

FOLDER = Path(__file__).parents[1] / "service" / "screenshots"


def opened(browser: Browser, url: str, width: int, height: int, dark: bool = False) -> Page:
    options = {"color_scheme": "dark" if dark else "light", "reduced_motion": "reduce"}
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    page.goto(url)
    expect(page.locator("#dot")).to_have_class("dot ready")
    return page


def write(page: Page, seed: int, length: int, samples: int = 1) -> None:
    page.fill("#seed", str(seed))
    page.fill("#max_tokens", str(length))
    page.locator("#n").focus()
    for _ in range(samples - 1):
        page.keyboard.press("ArrowRight")
    page.click("#go")
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))


def hover(page: Page, selector: str, number: int) -> None:
    page.locator(selector).nth(number).hover()
    page.wait_for_timeout(300)


def take(browser: Browser, url: str) -> None:
    page = opened(browser, url, 1180, 830)
    write(page, seed=7, length=560)
    hover(page, ".written span[data-c]", 132)
    page.screenshot(path=FOLDER / "write.png")

    page = opened(browser, url, 1180, 900)
    page.click("#tab-attend")
    expect(page.locator("#heads [aria-pressed=true]")).to_be_visible()
    page.get_by_role("radio", name=re.compile("Next")).click()
    hover(page, "#looks span", 35)
    page.screenshot(path=FOLDER / "attend.png")

    page = opened(browser, url, 1180, 720, dark=True)
    write(page, seed=3, length=330, samples=3)
    page.mouse.move(0, 0)
    page.screenshot(path=FOLDER / "samples-dark.png")

    page = opened(browser, url, 390, 800)
    page.click("#tab-read")
    expect(page.locator("#read-text span[data-c]").first).to_be_visible()
    page.screenshot(path=FOLDER / "read-phone.png", full_page=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with RunningServer(BUNDLED) as server, sync_playwright() as playwright:
        server.wait_until_ready()
        take(playwright.chromium.launch(executable_path=find("browser", "chromium"), args=["--no-sandbox"]), server.url)
