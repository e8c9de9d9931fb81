"""The page of tools/plot.py in a browser: it draws what the files say, and fetches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phaseloop.tools import plot
from tests.tools.test_plot import ROWS, a_run

pytestmark = pytest.mark.browser


def drawn(driver: Any, panel: int) -> list[dict[str, Any]]:
    """The traces of a panel, as plotly has them."""
    found: list[dict[str, Any]] = driver.execute_script(
        f"return document.getElementById('plot-{panel}').data"
        ".map(t => ({x: t.x, y: t.y, name: t.name, mode: t.mode, text: t.text}))"
    )
    return found


def click(driver: Any, selector: str) -> None:
    driver.execute_script(f"document.querySelector({json.dumps(selector)}).click()")


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    from tests.rigs import browser

    folders = [a_run(tmp_path / name) for name in ("a", "b")]
    assert plot.run([*map(str, folders), f"out={tmp_path / 'out'}"]) == 0
    with browser.opened((tmp_path / "out" / plot.PAGE).as_uri()) as driver:
        assert driver.execute_script("return document.body.dataset.drawn") == "yes"
        # Of the loss each run has log points, the test's and, behind them, its two events.
        loss = drawn(driver, 0)
        assert [(t["name"], len(t["x"])) for t in loss] == [
            ("a", 4), ("a", 2), ("b", 4), ("b", 2), ("a", 2), ("b", 2)
        ]  # fmt: skip
        assert loss[0]["y"] == [4.0, 3.0, None, 1.0]
        assert loss[4]["text"] == [
            "resumed after update 2", f"skip at update 4: {ROWS[6]['reason']}"
        ]  # fmt: skip
        assert len(driver.find_elements("css selector", ".panel svg .scatterlayer .trace")) >= 6
        for axis, wanted in (("samples", [8, 16, 24, 32]), ("time", [1, 3, 14, 16])):
            click(driver, f"#axis input[value={axis}]")
            assert drawn(driver, 0)[0]["x"] == wanted
            assert len(drawn(driver, 2)[0]["x"]) == 4
        click(driver, "#runs input[value='0']")
        assert {t["name"] for panel in range(3) for t in drawn(driver, panel)} == {"b"}
        click(driver, "#marks")
        click(driver, "#points")
        assert [len(t["x"]) for t in drawn(driver, 0)] == [2]
        assert driver.get_log("browser") == []
        asked = [json.loads(e["message"])["message"] for e in driver.get_log("performance")]
        urls = [
            e["params"]["request"]["url"]
            for e in asked
            if e["method"] == "Network.requestWillBeSent"
        ]
        assert [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []
