"""The pages of a ring that trains: numbers move, a group is compared, tokens are those of the journal, keys suffice."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.checkpoint.journal import read_journal
from learner.data.token_values import read_token_values
from protocol.messages import Owner, TrajectoryGroup
from tests.support.waiting import wait_until
from tests.ui.browsing import ANSWER_MS, ANSWER_S, SIZES, THEMES, Ring, Tab

NewTab = Callable[..., Tab]
PAGES = (
    *("overview", "throughput", "staleness", "fleet", "live", "trajectories", "accounting", "evaluations"),
    *("logs", "settings"),
)
SERIOUS = {"serious", "critical"}


def trained(ring: Ring, seq: int) -> TrajectoryGroup:
    return next(entry.group for entry in read_journal(ring.directory / "journal") if entry.group.seq == seq)


def trained_later(ring: Ring, seq: int) -> TrajectoryGroup:
    def there() -> bool:
        return any(entry.group.seq == seq for entry in read_journal(ring.directory / "journal"))

    wait_until(there, f"seq {seq} is trained", ANSWER_S)
    return trained(ring, seq)


def step_of(ring: Ring, seq: int) -> int:
    return next(entry.step for entry in read_journal(ring.directory / "journal") if entry.group.seq == seq)


def whole(text: str) -> int:
    found = re.search(r"\d[\d,]*", text)
    assert found, text
    return int(found[0].replace(",", ""))


def test_numbers_move_while_it_trains(ring: Ring, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{ring.url}/#/overview")
    shown.page.locator(".live", has_text="● live").wait_for()
    begun, curve = whole(shown.text(".card .value")), shown.text("figure .u-legend .u-value")
    shown.until(lambda: whole(shown.text(".card .value")) >= begun + 2, "the step on its card")
    shown.until(lambda: whole(shown.text(".progress")) >= begun + 2, "the step in the head of the page")
    assert shown.text("figure .u-legend .u-value") != curve, "the curve's newest step"
    assert shown.page.locator("figure canvas").count() >= 4 and ring.steps >= begun + 2

    shown.page.keyboard.press("2")
    cost = shown.page.locator(".card", has_text="cost so far")
    cost.wait_for()
    assert "at 2 per device hour" in cost.inner_text()

    shown.page.keyboard.press("4")
    engine = shown.page.get_by_role("region", name="engines").locator("tbody tr")
    assert "engine-1" in engine.inner_text()
    shown.until(lambda: "ready" in engine.inner_text(), "the engine between two loads")
    version = engine.locator("td").nth(3)
    before = version.inner_text()
    shown.until(lambda: version.inner_text() != before, "the engine's version")

    shown.page.keyboard.press("6")
    new = shown.page.locator("button.fresh")
    new.wait_for()
    total = whole(shown.text("[role=status]").partition(" of ")[2])
    new.click()
    shown.until(lambda: whole(shown.text("[role=status]").partition(" of ")[2]) > total, "new trajectories")


def test_filters_select_what_they_say(ring: Ring, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{ring.url}/#/trajectories?step_max=3&order=oldest")
    everything = whole(shown.text("[role=status]").partition(" of ")[2])

    def chosen() -> tuple[int, list[list[str]]]:
        rows = shown.page.locator("table.rows tbody tr")
        return whole(shown.text("[role=status]").partition(" of ")[2]), [
            rows.nth(i).locator("td").all_inner_texts() for i in range(min(rows.count(), 10))
        ]

    def ask(name: str, value: str) -> tuple[int, list[list[str]]]:
        shown.page.locator(".pager").evaluate("pager => pager.dataset.old = '1'")
        field = shown.page.locator(f"#f-{name}")
        field.select_option(value) if name in ("signal", "status") else field.fill(value)
        shown.page.locator(".pager:not([data-old])").wait_for(state="attached")
        return chosen()

    total, rows = ask("reward_min", "0.5")
    assert 0 < total < everything and {reward for row in rows for reward in row[3].split()} == {"1"}
    right = {t.answer for t in trained(ring, whole(rows[0][10])).trajectories if t.reward}
    assert rows[0][2] in right, "the answer of the journal"
    both = ask("reward_min", "")[0]
    differ = ask("signal", "some")[0]
    assert both == everything and 0 < differ < everything and ask("signal", "")[0] == everything
    word = rows[0][1].split()[-2]
    found, rows = ask("text", word)
    assert 0 < found < everything
    for row in rows:
        group = trained(ring, whole(row[10]))
        queries = [s.query or "" for t in group.trajectories for s in t.segments]
        assert word in " ".join([group.question.text, *(t.answer or "" for t in group.trajectories), *queries])
    assert shown.page.url.endswith(f"text={word}&order=oldest&step_max=3"), "the filter is in the address"


def test_a_group_is_compared_and_its_tokens_are_those_of_the_journal(ring: Ring, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{ring.url}/#/trajectories?order=oldest")
    shown.page.locator("table.rows tbody tr").first.click()
    shown.page.get_by_role("link", name="side by side").click()
    seq = whole(shown.text(".crumbs"))
    group = trained(ring, seq)
    columns = shown.page.locator("article.column")
    columns.first.wait_for()
    assert columns.count() == len(group.trajectories) == 8
    for i, one in enumerate(group.trajectories):
        said = columns.nth(i).inner_text()
        assert f"reward {one.reward:g}" in said and (one.answer or "none") in said
    assert group.question.text in shown.text("h1") and group.question.answers[0] in shown.text(".question")

    columns.nth(2).get_by_role("link", name="trajectory 3").click()
    shown.page.get_by_role("button", name="tokens (t)").click()
    tokens = shown.page.locator(".tokens.policy .token")
    tokens.first.wait_for()
    turns = [s for s in group.trajectories[2].segments if s.owner is Owner.POLICY]
    assert tokens.count() == sum(len(s.ids) for s in turns)
    tokens.nth(1).hover()
    said = shown.text(".detail")
    assert f"id {turns[0].ids[1]}," in said and f"log-prob {turns[0].logprobs[1]:.3f}"[:-1] in said
    assert f"version {turns[0].spans[0].version.label}" in said
    values = read_token_values(ring.directory, step_of(ring, seq), seq, 2)
    at = list(values["position"]).index(len(group.trajectories[2].segments[0].ids) + 1)
    assert (
        f"when trained: log-prob {values['logprob'][at]:.3f}"[:-1] in said and "ratio " in said and "advantage " in said
    )


def test_a_trajectory_is_read_while_it_is_generated(ring: Ring, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{ring.url}/#/live")
    chips = shown.page.get_by_role("region", name="groups in flight").locator("a.chip:not(.dimmed)")
    text = shown.page.locator(".segment.policy .text")

    def read() -> bool:
        # a trajectory of the demo takes seconds: the chosen one may have ended
        chips.first.click()
        shown.page.locator(".panel [role=status]:not(:text-is('waiting for the server'))").wait_for()
        return text.count() > 0

    shown.until(read, "a trajectory in flight")
    shown.page.locator(".panel [role=status]", has_text="reward").wait_for(timeout=ANSWER_MS)
    assert "<think>" in text.first.inner_text() and "version" in shown.text(".segment.policy .meta")
    seq = re.search(r"#/live/0/(\d+)/\d+$", shown.page.url)
    assert seq and trained_later(ring, int(seq[1])).question.text in shown.text(".panel h2")
    shown.page.keyboard.press("Escape")
    shown.until(lambda: shown.page.url.endswith("#/live"), "the list")


def test_the_keyboard_is_enough(ring: Ring, tab: NewTab) -> None:
    shown = tab()
    page, press = shown.page, shown.page.keyboard.press
    shown.open(f"{ring.url}/")
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    press("?")
    page.locator("dialog[open]").wait_for()
    press("Escape")
    page.locator("dialog").wait_for(state="detached")
    press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    press("/")
    shown.until(lambda: page.evaluate("document.activeElement.id") == "f-text", "the field of the search")
    # the table from before the search stays until its answer
    page.locator(".pager").evaluate("pager => pager.dataset.old = '1'")
    page.keyboard.type("the")
    press("Escape")
    shown.until(lambda: "text=the" in page.url, "the search")
    page.locator(".pager:not([data-old])").wait_for(state="attached")
    for key in "jjk":
        press(key)
    assert page.locator("tr.chosen").get_attribute("id") == "row-0"
    press("Enter")
    page.locator(".chip[aria-current]").wait_for()
    opened = re.search(r"/group/(\d+)/(\d+)", page.url)
    assert opened
    place = int(opened[2])
    press("k" if place else "j")
    shown.until(lambda: f"/group/{opened[1]}/{place - 1 if place else 1}?" in page.url, "the neighbour")
    press("t")
    page.locator(".tokens.policy .token").first.wait_for()
    for _ in range(60):
        press("Tab")
        if "token" in (page.evaluate("document.activeElement.className") or ""):
            break
    assert "log-prob" in shown.text(".detail"), "Tab reaches the tokens"
    press("Escape")
    page.locator("table.rows").wait_for()
    assert "text=the" in page.url, "back where it began"
    for number, name in enumerate(PAGES, 1):
        press(str(number % 10))
        page.locator(f'#tabs a[aria-current]:text-is("{name}")').wait_for()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", SIZES)
def test_every_page_fits_and_is_accessible(ring: Ring, tab: NewTab, width: int, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    shown = tab(width, theme)
    shown.open(f"{ring.url}/#/trajectories?signal=some")
    seq = shown.page.locator("table.rows tbody tr").first.locator("td").last.inner_text()
    for name in (*PAGES, f"group/{seq}", f"group/{seq}/0", "tokens"):
        if name == "tokens":
            shown.page.keyboard.press("t")
            shown.page.locator(".token").first.wait_for()
        else:
            shown.open(f"{ring.url}/#/{name}")
            shown.page.locator("#main p.dim", has_text=re.compile("^loading$")).wait_for(state="detached")
        wide = shown.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
        found = Axe().run(shown.page).response["violations"]
        bad = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS]
        assert not bad, (name, bad)
        if folder := os.environ.get("FORAY_UI_SHOTS"):
            path = Path(folder) / f"{name.replace('/', '-').replace(seq, 'seq')}-{width}-{theme}.png"
            shown.page.screenshot(path=path, full_page=True)
        figure = {f"group/{seq}/0": "trajectory", "overview": name, "fleet": name}.get(name)
        if (folder := os.environ.get("FORAY_UI_FIGURES")) and figure and (width, theme) == (1280, "light"):
            shown.page.screenshot(path=Path(folder) / f"dashboard-{figure}.png")


def test_an_operator_drains_an_engine_and_the_pages_go_on_when_the_run_is_stopped(ring: Ring, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{ring.url}/#/fleet")
    assert "serves" in shown.page.get_by_role("region", name="retrievers").inner_text()
    shown.page.get_by_role("button", name="drain engine-1", exact=True).click()
    shown.page.get_by_role("button", name="really drain engine-1").click()
    engine = shown.page.get_by_role("region", name="engines").locator("tbody tr")
    engine.locator(".badge", has_text="draining").wait_for()
    shown.page.keyboard.press("1")
    shown.page.locator(".card").first.wait_for()
    assert "drain-asked" in shown.text("#main") and "training" in shown.text("#top")
    ring.process.send_signal(signal.SIGINT)
    ring.process.wait(ANSWER_S)
    shown.page.locator("#top .badge", has_text="stopped").wait_for(timeout=ANSWER_MS)
    shown.page.locator(".panel", has_text="resume with").wait_for()
    shown.page.keyboard.press("6")
    shown.page.locator("#row-5").wait_for(state="attached")
