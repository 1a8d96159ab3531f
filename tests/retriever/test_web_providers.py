"""Each provider's readers on replies as its documentation shows them (shortened), and on what they should not eat."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.backends.web.config import (
    BraveSettings,
    GoogleCseSettings,
    SearxngSettings,
    SerpApiSettings,
    SerperSettings,
    TavilySettings,
)
from retriever.backends.web.provider import Provider, ProviderHit, WebSearchError
from retriever.backends.web.providers.brave import Brave
from retriever.backends.web.providers.google import GoogleCse, SerpApi, Serper
from retriever.backends.web.providers.searxng import Searxng
from retriever.backends.web.providers.tavily import Tavily

PROVIDERS: dict[str, Provider] = {
    "serpapi": SerpApi(SerpApiSettings()),
    "serper": Serper(SerperSettings()),
    "google_cse": GoogleCse(GoogleCseSettings(cx="c")),
    "brave": Brave(BraveSettings(extra_snippets=True)),
    "tavily": Tavily(TavilySettings(answers=True)),
    "searxng": Searxng(SearxngSettings()),
}

OK = {"search_metadata": {"status": "Success"}}

CASES: list[tuple[str, dict[str, Any], list[ProviderHit]]] = [
    (
        "serpapi",
        OK
        | {
            "answer_box": {"type": "calculator_result", "result": "3.14"},
            "knowledge_graph": {
                "title": "Apple",
                "description": "A company.",
                "source": {"name": "Wikipedia", "link": "https://en.wikipedia.org/wiki/Apple_Inc."},
            },
            "organic_results": [
                {"position": 1, "title": "Coffee", "link": "https://c.example/", "snippet": "A drink."},
                {"position": 2, "title": "No snippet", "link": "https://d.example/"},
            ],
        },
        [
            ProviderHit("Answer", "3.14", box=True),
            ProviderHit("Apple", "A company.", "https://en.wikipedia.org/wiki/Apple_Inc.", box=True),
            ProviderHit("Coffee", "A drink.", "https://c.example/"),
            ProviderHit("No snippet", "", "https://d.example/"),
        ],
    ),
    (
        "serpapi",
        OK
        | {
            "answer_box": [
                {"title": "Zola", "answer": "1840", "snippet": "Born in 1840.", "link": "https://z.example/"}
            ]
        },
        [ProviderHit("Zola", "1840\nBorn in 1840.", "https://z.example/", box=True)],
    ),
    ("serpapi", OK | {"error": "Google hasn't returned any results for this query."}, []),
    (
        "serper",
        {
            "searchParameters": {"q": "apple inc", "type": "search"},
            "knowledgeGraph": {
                "title": "Apple",
                "website": "http://www.apple.com/",
                "description": "A company.",
                "descriptionLink": "https://en.wikipedia.org/wiki/Apple_Inc.",
                "attributes": {"CEO": "Tim Cook", "Site": "https://x.example", "Founded": "1976"},
            },
            "organic": [{"title": "Apple", "link": "https://www.apple.com/", "snippet": "Discover.", "position": 1}],
            "peopleAlsoAsk": [{"question": "?", "snippet": "no hit"}],
        },
        [
            ProviderHit(
                "Apple",
                "A company.\nCEO: Tim Cook\nFounded: 1976",
                "https://en.wikipedia.org/wiki/Apple_Inc.",
                box=True,
            ),
            ProviderHit("Apple", "Discover.", "https://www.apple.com/"),
        ],
    ),
    (
        "google_cse",
        {
            "kind": "customsearch#search",
            "items": [{"title": "T", "link": "https://t.example/", "snippet": "one \ntwo\xa0three"}],
        },
        [ProviderHit("T", "one two three", "https://t.example/")],
    ),
    ("google_cse", {"kind": "customsearch#search", "searchInformation": {"totalResults": "0"}}, []),
    (
        "brave",
        {
            "type": "search",
            "infobox": {"results": [{"title": "Zola", "long_desc": "A writer.", "url": "https://z.example/"}]},
            "web": {
                "results": [
                    {
                        "title": "A &amp; <strong>B</strong>",
                        "url": "https://b.example/",
                        "description": "It&#x27;s <strong>this</strong> <code>",
                        "extra_snippets": ["more", 3, "&lt;last&gt;"],
                    }
                ]
            },
        },
        [
            ProviderHit("Zola", "A writer.", "https://z.example/", box=True),
            ProviderHit("A & B", "It's this <code>\nmore\n<last>", "https://b.example/"),
        ],
    ),
    ("brave", {"type": "search", "query": {"original": "x"}}, []),
    (
        "tavily",
        {
            "query": "Who is Leo Messi?",
            "answer": "A footballer.",
            "images": [],
            "results": [{"title": "M", "url": "https://m.example/", "content": "Born 1987.", "score": 0.8}],
            "response_time": "1.67",
        },
        [ProviderHit("Answer", "A footballer.", box=True), ProviderHit("M", "Born 1987.", "https://m.example/")],
    ),
    (
        "searxng",
        {
            "query": "x",
            "answers": ["an old answer", {"answer": "a new one", "url": "https://n.example/"}, 3, ""],
            "infoboxes": [
                {"infobox": "Zola", "content": "A writer.", "urls": [{"title": "W", "url": "https://w.example"}]}
            ],
            "results": [{"title": "T", "url": "https://t.example/", "content": None}],
        },
        [
            ProviderHit("Answer", "an old answer", box=True),
            ProviderHit("Answer", "a new one", "https://n.example/", box=True),
            ProviderHit("Zola", "A writer.", "https://w.example", box=True),
            ProviderHit("T", "", "https://t.example/"),
        ],
    ),
]


@pytest.mark.parametrize(("name", "reply", "found"), CASES, ids=[f"{case[0]}{i}" for i, case in enumerate(CASES)])
def test_a_documented_reply_is_read(name: str, reply: dict[str, Any], found: list[ProviderHit]) -> None:
    assert PROVIDERS[name].parse(reply) == found


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("serpapi", {"search_metadata": {"status": "Error"}, "error": "Please try again later."}),
        ("serpapi", OK | {"organic_results": {"title": "T"}}),
        ("searxng", {"results": "none"}),
        ("tavily", {"detail": {"error": "x"}}),
        ("brave", {"type": "search", "web": 3}),
    ],
)
def test_a_failure_does_not_pass_for_an_empty_answer(name: str, reply: dict[str, Any]) -> None:
    with pytest.raises(WebSearchError, match="garbage"):
        PROVIDERS[name].parse(reply)


NAMES = sorted(
    {key for _, reply, _ in CASES for key in reply} | {"results", "value", "title", "url", "content", "answer"}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=True) | st.sampled_from(["", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("name", PROVIDERS)
@settings(max_examples=25, deadline=None)
@given(reply=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_no_reply_raises_anything_but_garbage(name: str, reply: dict[str, Any]) -> None:
    try:
        found = PROVIDERS[name].parse(reply)
    except WebSearchError as failure:
        assert failure.failure.cause == "garbage"
    else:
        assert all(isinstance(part, str) for item in found for part in item[:3])


def test_a_long_query_is_cut_where_brave_would_refuse_it() -> None:
    asked = Brave(BraveSettings()).request("word " * 60, 3).params["q"]
    assert len(asked.split()) == 50 and len(Brave(BraveSettings()).request("x" * 900, 3).params["q"]) == 400
