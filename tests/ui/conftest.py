"""The dashboard in Debian's Chromium: `make test-ui`. The other targets leave this folder out.

Playwright comes from `requirements/ui.txt`; it drives the installed `chromium` (FORAY_CHROMIUM names another) and
downloads no browser. The tests use one live ring, a run whose texts attack the page, and one of 100,000 trajectories.
FORAY_UI_SHOTS names a folder for screenshots of every page, FORAY_UI_FIGURES one for those of docs/dashboard.md.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.dashboard_run import write_large_run, write_run
from tests.ui.browsing import ANSWER_MS, SIZES, Ring, Tab, dashboard, running

START_S = 600.0
CHROMIUM = shutil.which(os.environ.get("FORAY_CHROMIUM") or "chromium")


def _missing() -> str:
    lacking = [name for name in ("playwright", "axe_playwright_python") if find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed: run `make test-ui`"
    return "" if CHROMIUM else "chromium is not installed: apt-get install chromium"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window. Tests skip without it; in continuous integration they fail."""
    if why := _missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=ANSWER_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """`tab(1280, "dark")` opens a tab. After the test none may have reported an error or opened a dialog."""
    opened: list[tuple[Any, Tab]] = []

    def new(width: int = 1280, theme: str = "light") -> Tab:
        viewport = {"width": width, "height": SIZES[width]}
        context = browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce")
        context.set_default_timeout(ANSWER_MS)
        made = Tab(context.new_page(), [])
        made.page.on("pageerror", lambda error: made.faults.append(f"error: {error}"))
        made.page.on("console", lambda m: made.faults.append(f"{m.type}: {m.text}") if m.type == "error" else None)

        def dialog(shown: Any) -> None:
            made.faults.append(f"dialog: {shown.message}")
            shown.dismiss()

        made.page.on("dialog", dialog)
        opened.append((context, made))
        return made

    yield new
    faults = [fault for _, one in opened for fault in one.faults]
    for context, _ in opened:
        context.close()
    assert not faults


@pytest.fixture(scope="session")
def ring(browser: Any, warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """`foray demo` with more steps than the tests need, and its dashboard, from the third step on."""
    directory = tmp_path_factory.mktemp("ring") / "demo"
    words = ("demo", "--dir", str(directory), "--model", str(warm_model), "--json")
    settings = ("run.steps=1000", "learner.checkpoint_every=5", "launch.device_price=2")
    kept = ("learner.token_values.every=1", "learner.token_values.keep=1000")
    with running(*words, *settings, *kept, cwd=directory.parent) as process:
        made = Ring(process, directory, "")
        deadline = time.monotonic() + START_S
        while made.steps < 3:
            assert process.poll() is None and time.monotonic() < deadline, (directory.parent / "demo.log").read_text()
            time.sleep(0.2)
        with dashboard(directory) as made.url:
            yield made


@pytest.fixture(scope="session")
def hostile(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard of a run whose passages hold scripts."""
    with dashboard(write_run(tmp_path_factory.mktemp("hostile") / "run")) as url:
        yield url


@pytest.fixture(scope="session")
def large(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard of a run of 100,000 trajectories."""
    with dashboard(write_large_run(tmp_path_factory.mktemp("large") / "run")) as url:
        yield url
