"""What a finished run shows: texts that attack the page stay texts, the form for a token, 100,000 trajectories."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.dashboard_run import EVIL, EVIL_IMAGE, write_run, write_stuffed
from tests.ui.browsing import Tab, dashboard

NewTab = Callable[..., Tab]
ONE_S, TIMES = 1.0, 3


def inert(page: Any) -> None:
    assert page.locator("img, iframe, object, #main script").count() == 0
    assert page.evaluate("document.querySelectorAll('[onerror], [onload], [onclick]').length") == 0


@pytest.mark.parametrize("view", ["group/7", "group/7/0", "tokens"])
def test_passages_with_scripts_are_shown_as_text(hostile: str, tab: NewTab, view: str) -> None:
    """A dialog, an error or a refused request fails the test too: see `tab`."""
    shown = tab()
    shown.open(f"{hostile}/#/{'group/7/0' if view == 'tokens' else view}")
    if view == "tokens":
        shown.page.keyboard.press("t")
        shown.page.locator(".token").first.wait_for()
    for passage in shown.page.locator("details.passage").all():
        if passage.get_attribute("open") is None:
            passage.locator("summary").click()
    said = shown.text("#main")
    assert EVIL in said and EVIL_IMAGE in said
    inert(shown.page)


def test_logs_and_settings_are_read_and_found(hostile: str, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{hostile}/#/logs")
    shown.page.get_by_role("link", name="rollout-1").click()
    entries = shown.page.locator(".log li")
    shown.until(lambda: entries.count() == 3, "the log of rollout-1")
    assert "stopped" in entries.first.inner_text() and shown.page.url.endswith("#/logs/rollout-1")
    shown.page.get_by_label("only errors").check()
    shown.until(lambda: entries.count() == 1, "its error")
    assert EVIL in entries.first.inner_text() and entries.first.locator(".badge").inner_text() == "error"
    inert(shown.page)

    shown.page.keyboard.press("0")
    rows = shown.page.get_by_role("region", name="settings").locator("tbody tr")
    rows.first.wait_for()
    assert any(text.startswith("run.max_lag\t0\t2") for text in rows.all_inner_texts())
    changed = rows.count()
    shown.page.get_by_label("only what differs").uncheck()
    assert rows.count() > 10 * changed and "run.max_lag differs\t0\t2" in rows.all_inner_texts()
    shown.page.get_by_label("find").fill("clip_low")
    assert 0 < rows.count() < 9 and all("clip_low" in text for text in rows.all_inner_texts())


def test_the_first_page_shows_what_is_wrong_and_leads_to_the_trajectories(tab: NewTab, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    write_stuffed(run_dir)
    with dashboard(run_dir) as url:
        shown = tab()
        shown.open(url)
        found = shown.page.locator("#diagnosis")
        found.wait_for()
        assert "answers are stuffed: 6 words" in found.inner_text() and "length_penalty" in found.inner_text()
        found.locator("summary").click()
        assert EVIL in found.inner_text() and EVIL_IMAGE in found.inner_text()
        inert(shown.page)
        found.get_by_role("link", name="seq 32, trajectory 1").click()
        shown.until(lambda: "#/group/32/0" in shown.page.url, "the trajectory")


def test_markup_would_be_noticed(hostile: str, tab: NewTab) -> None:
    """The control of the test above: the same text as HTML is an element, and its script is refused and reported."""
    shown = tab()
    shown.open(f"{hostile}/#/group/7/0")
    shown.page.evaluate("text => { document.getElementById('main').innerHTML = text }", EVIL_IMAGE)
    with pytest.raises(AssertionError):
        inert(shown.page)
    shown.until(lambda: any("Content Security Policy" in fault for fault in shown.faults), "the policy's report")
    assert not [fault for fault in shown.faults if fault.startswith("dialog")]
    shown.faults.clear()


def test_an_exported_trajectory_opens_as_text(hostile: str, tab: NewTab, tmp_path: Path) -> None:
    shown = tab()
    shown.open(f"{hostile}/#/group/7/0")
    with shown.page.expect_download() as download:
        shown.page.get_by_role("button", name="save as HTML").click()
    path = tmp_path / "trajectory.html"
    download.value.save_as(path)
    assert download.value.suggested_filename == "seq-7-1.html"
    shown.page.goto(path.as_uri())
    assert EVIL in shown.text("body") and EVIL_IMAGE in shown.text("body")
    inert(shown.page)


def test_the_page_asks_for_the_token_and_keeps_it_for_the_tab_only(tab: NewTab, tmp_path: Path) -> None:
    token = secrets.token_urlsafe(32)
    with dashboard(write_run(tmp_path / "run"), FORAY_VIEWER_TOKEN=token) as url:
        shown = tab()
        shown.page.goto(url)
        field = shown.page.get_by_label("Token of the role")
        field.fill(secrets.token_urlsafe(32))
        field.press("Enter")
        shown.until(lambda: field.input_value() == "", "the form again")
        field.fill(token)
        field.press("Enter")
        shown.page.locator(".card").first.wait_for()
        assert token not in shown.page.url and shown.page.evaluate("localStorage.length") == 0
        refused = [fault for fault in shown.faults if "401" in fault]
        assert len(refused) >= 2, "without a token, and with a wrong one"
        shown.faults[:] = [fault for fault in shown.faults if fault not in refused]


FILTERS = [
    ("status", "answered"), ("status", ""), ("source", "hotpot"), ("source", ""), ("signal", "none"), ("signal", ""),
    *((("order", order)) for order in ("best", "worst", "longest", "stalest", "oldest", "newest")),
    ("reward_min", "0.5"), ("reward_max", "0.5"), ("reward_min", ""), ("reward_max", ""),
    ("step_min", "700"), ("step_max", "705"), ("step_min", ""), ("step_max", ""), ("version", "1.0"), ("version", ""),
    ("seq", "12000"), ("seq", ""), ("text", "emma 12345"), ("text", "who wrote"), ("text", ""),
]  # fmt: skip
CHOICES = {"status", "source", "signal", "order"}


@pytest.mark.timeout(240)
def test_with_100_000_trajectories_a_page_and_each_filter_take_less_than_a_second(large: str, tab: NewTab) -> None:
    shown = tab()
    page = shown.page
    shown.open(f"{large}/#/overview")
    shown.until(
        lambda: page.evaluate("fetch('/api/overview').then(r => r.json()).then(o => o.index.trajectories)") > 100_000,
        "the index",
    )
    first = []
    for _ in range(TIMES):
        page.goto("about:blank")
        began = time.monotonic()
        page.goto(f"{large}/#/trajectories")
        page.locator("#row-5").wait_for(state="attached")
        first.append(time.monotonic() - began)
    taken: dict[tuple[str, str], list[float]] = {}
    for name, value in FILTERS * TIMES:
        page.locator(".pager").evaluate("pager => pager.dataset.old = '1'")
        field = page.locator(f"#f-{name}")
        began = time.monotonic()
        field.select_option(value) if name in CHOICES else field.fill(value)
        page.locator(".pager:not([data-old])").wait_for(state="attached")
        taken.setdefault((name, value), []).append(time.monotonic() - began)
    medians = {step: statistics.median(times) for step, times in taken.items()} | {
        ("first", "page"): statistics.median(first)
    }
    print({" ".join(step): round(seconds, 2) for step, seconds in medians.items()})
    assert not {step: seconds for step, seconds in medians.items() if seconds >= ONE_S}
    assert "of 100,7" in shown.text("[role=status]")
