"""The page `chat` asks a stand-in for `foray serve`: streams, folded searches, two models, stop, keys, axe-core."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.dashboard_run import EVIL, EVIL_IMAGE, write_run
from tests.support.fake_serve import EMMA, HOLD, PASSAGES, FakeServe, ends, says, searched, serving, thinks
from tests.ui.browsing import SIZES, THEMES, Tab, dashboard

NewTab = Callable[..., Tab]
TOKEN = secrets.token_urlsafe(32)
LONG = "A long passage about a novel, its author and the year in which it was published. " * 6
HOSTILE = {"query": EVIL, "passages": [{"title": EVIL_IMAGE, "text": EVIL + LONG, "score": 0.5}], "error": None}
FAILED = {"query": "persuasion", "passages": [], "error": "the retriever does not answer"}


def steps(body: Any) -> Any:
    """Return what the stand-in plays for the last question of a request."""
    asked = body["messages"][-1]["content"]
    if body["model"] == "emma-bare":
        return [says(f"I remember {len(body['messages']) // 2} questions, and it was Austen."), ends()]
    if "wait" in asked:
        return [thinks("Let me think"), HOLD]
    if "evil" in asked:
        return [thinks(EVIL), searched(HOSTILE), searched(FAILED), says(EVIL_IMAGE), ends(HOSTILE, FAILED)]
    return [ends(reason="length", cause="turn")] if "never" in asked else EMMA


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServe]:
    with serving(FakeServe(steps, TOKEN)) as one:
        yield one


@pytest.fixture(scope="module")
def url(browser: Any, server: FakeServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = write_run(tmp_path_factory.mktemp("chat") / "run")
    with dashboard(run, "--chat", server.url, FORAY_SERVE_TOKEN=TOKEN) as found:
        yield found


def ask(shown: Tab, question: str, status: str = "answered") -> None:
    before = shown.page.locator(".asked").count()
    shown.page.get_by_label("Question").fill(question)
    shown.page.get_by_label("Question").press("Enter")
    shown.until(lambda: shown.page.locator(".asked").count() == before + 1, "the question")
    shown.until(lambda: status in shown.text("form [role=status]"), status)


def test_an_answer_is_streamed_with_its_searches_folded(server: FakeServe, url: str, tab: NewTab) -> None:
    shown = tab()
    headers: list[str] = []
    shown.page.on("request", lambda request: headers.append(str(request.headers) + (request.post_data or "")))
    shown.open(f"{url}/#/overview")
    shown.page.keyboard.press("c")
    shown.page.get_by_label("Question").wait_for()
    shown.until(lambda: shown.page.evaluate("document.activeElement.id") == "chat-question", "the focus")
    ask(shown, "Who wrote Emma?")
    article = shown.page.locator("article").first
    said = article.inner_text()
    assert "I should look it up." in said and "Jane Austen" in said and "version 12" in said and "1 search" in said
    search = article.locator("details.search")
    assert "who wrote Emma" in search.inner_text() and PASSAGES[0]["text"] not in search.inner_text(), "folded"
    search.locator("summary").press("Enter")
    assert str(PASSAGES[0]["text"]) in search.inner_text() and "7.25" in search.inner_text()
    assert article.get_attribute("aria-busy") is None
    shown.page.keyboard.press("Escape")
    shown.page.locator("#tabs a", has_text="logs").click()
    shown.page.locator(".log").wait_for()
    shown.page.locator("#tabs a", has_text="chat").click()
    shown.page.locator("article").wait_for()
    assert TOKEN not in "".join(headers) + shown.page.content() and server.tokens[-1] == f"Bearer {TOKEN}"


def test_two_models_side_by_side_and_search_off(server: FakeServe, url: str, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{url}/#/chat")
    shown.page.get_by_label("compare with").select_option(label="emma-bare (no searches)")
    shown.page.get_by_label("search", exact=True).uncheck()
    ask(shown, "Who wrote Emma?")
    ask(shown, "And Persuasion?")
    columns = shown.page.locator(".columns").last.locator("article.column")
    assert columns.count() == 2 and "Jane Austen" in columns.nth(0).inner_text()
    assert "I remember 1 questions" in columns.nth(1).inner_text(), "the model without a loop has the history"
    loop = [request for request in server.requests if request["model"] == "emma"][-1]
    assert loop["foray"] == {"search": False} and len(loop["messages"]) == 1


def test_an_answer_is_stopped_and_a_failure_is_shown(server: FakeServe, url: str, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{url}/#/chat")
    before = server.left
    ask(shown, "wait", "answering")
    shown.page.locator("article", has_text="Let me think").wait_for()
    shown.page.get_by_role("button", name="Stop").click()
    shown.until(lambda: "stopped" in shown.text("form [role=status]"), "the stop")
    shown.until(lambda: server.left == before + 1, "the server's slot")
    ask(shown, "wait", "answering")
    shown.page.locator("article", has_text="Let me think").last.wait_for()
    shown.page.get_by_label("Question").press("Escape")
    shown.until(lambda: server.left == before + 2, "Escape stops too")
    ask(shown, "never", "no answer: turn")
    assert "no answer: turn" in shown.page.locator("article").last.inner_text()


def test_texts_of_the_server_stay_texts(url: str, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{url}/#/chat")
    ask(shown, f"evil {EVIL_IMAGE}")
    shown.page.locator("details.search summary").first.click()
    said = shown.text("#main")
    assert said.count(EVIL) >= 3 and said.count(EVIL_IMAGE) >= 3 and "failed" in said
    assert shown.page.locator("img, iframe, object, #main script").count() == 0


def test_without_a_server_the_page_says_how(hostile: str, tab: NewTab) -> None:
    shown = tab()
    shown.open(f"{hostile}/#/chat")
    assert "foray dashboard RUN --chat" in shown.text("#main") and shown.page.get_by_label("Question").count() == 0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", SIZES)
def test_the_conversation_fits_and_is_accessible(url: str, tab: NewTab, width: int, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    shown = tab(width, theme)
    shown.open(f"{url}/#/chat")
    for name in ("empty", "one", "two"):
        if name == "one":
            ask(shown, "Who wrote Emma?")
            ask(shown, f"evil {LONG}")
            shown.page.locator("details.search summary").first.click()
        elif name == "two":
            shown.page.get_by_label("compare with").select_option(index=2)
            ask(shown, "Who wrote Emma?")
            ask(shown, "never", "no answer")
        wide = shown.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
        found = Axe().run(shown.page).response["violations"]
        bad = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]
        assert not [one for one in bad if one[0] not in ("region",)], (name, bad)
        if folder := os.environ.get("FORAY_UI_SHOTS"):
            shown.page.screenshot(path=Path(folder) / f"chat-{name}-{width}-{theme}.png", full_page=name != "two")
