"""A headless browser, Chromium as Debian has it, for tests marked ``browser``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WIDTH, HEIGHT = 1280, 900


@contextmanager
def opened(url: str, *, width: int = WIDTH, height: int = HEIGHT) -> Iterator[webdriver.Chrome]:
    """A window that shows ``url``, an ``http:`` or ``file:`` address of this machine.

    It cannot reach any other machine: names are not looked up. What the page says in its console is
    in ``driver.get_log("browser")``, and what it asked for in ``driver.get_log("performance")``.

    Raises:
        AssertionError: Chromium or its driver is not installed.
    """
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    assert not missing, (
        f"tests marked browser need {' and '.join(missing)}: "
        f"apt-get install chromium chromium-driver"
    )
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    for argument in (
        "--headless=new",
        "--no-sandbox",  # root has none
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(programs["chromedriver"])))
    try:
        driver.get(url)
        yield driver
    finally:
        driver.quit()
