"""Pages as text: what is left out, how bytes become characters, and pages that are made to hurt."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever.backends.web.pages import decode, page_of_html, page_of_plain
from retriever.backends.web.provider import WebSearchError

PAGE = """<!DOCTYPE html><html><head><title>Émile &amp; co</title><style>p { color: red }</style>
<script>if (a < b) { alert("</p>") }</script></head><body><header>Site</header><nav><ul><li>Home</li></ul></nav>
<main><h1>Zola</h1><p>French   <b>novelist</b>,
born 1840.</p><![if !IE]><table><tr><td>Died</td><td>1902</td></tr></table><![endif]><!-- hidden -->
<br>L&rsquo;œuvre</main>
<aside>Ads</aside><footer>Imprint</footer></body></html>"""


def test_title_and_text_without_what_surrounds_them() -> None:
    page = page_of_html(PAGE, 1000)
    assert page.title == "Émile & co"
    assert page.text.split("\n") == ["Zola", "French novelist,", "born 1840.", "Died 1902", "L\u2019œuvre"]


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("no tags & no end", "no tags & no end"),
        ("<p>a<p>b", "a\nb"),
        ("<nav>menu<main>text</main>", "text"),
        ("<title>never closed<body><p>text", "text"),
        ("<svg><title>icon</title></svg><p>text", "text"),
        ("<p>1 < 2 and 3 > 2</p>", "1 < 2 and 3 > 2"),
        ("<script>never closed <p>text", ""),
        ("</nav></p><p>text", "text"),
        ("x" * 9000, "x" * 9000),
        ("", ""),
        ("<script>" + "x" * 300_000 + "</script><p>text", "text"),
        ("<p>text" + "<a href='" + "x" * 300_000, "text"),
        ("<p>&#0;&#x110000;&nosuch;</p>", "\ufffd\ufffd&nosuch;"),
    ],
)
def test_pages_that_are_not_quite_html(html: str, text: str) -> None:
    assert page_of_html(html, 10_000).text == text


@given(st.text(alphabet=st.sampled_from("<>/!-[]&;=\"' abp\n\x00"), max_size=300))
def test_no_page_raises_anything_but_its_fault(html: str) -> None:
    try:
        page = page_of_html(html, 50)
    except WebSearchError as failure:
        assert failure.failure.cause == "garbage"
    else:
        assert len(page.text) <= 50


@pytest.mark.parametrize("piece", ["<!--", "<a ", "<a b='", "</", "<![x", "<!", "&#", "<nav>", "<p", '<a b="'])
def test_a_page_of_unfinished_pieces_takes_no_quadratic_time(piece: str) -> None:
    html = piece * (400_000 // len(piece))
    begin = time.process_time()
    try:
        page_of_html(html, 1000)
    except WebSearchError as failure:
        assert failure.failure.cause == "garbage"
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    ("content", "charset", "text"),
    [
        ("é".encode(), None, "é"),
        ("é".encode("latin-1"), "iso-8859-1", "é"),
        ("é".encode("cp1252"), None, "\ufffd"),
        (b'<meta charset="shift_jis">' + "東京".encode("shift_jis"), None, '<meta charset="shift_jis">東京'),
        ("é".encode("utf-8-sig"), "latin-1", "é"),
        ("東".encode("utf-16"), None, "東"),
        ("é".encode(), "no-such-charset", "é"),
        ("é".encode(), "zlib", "é"),
        ("é".encode(), "idna", "é"),
    ],
)
def test_bytes_become_text_by_mark_header_meta_and_utf_8(content: bytes, charset: str | None, text: str) -> None:
    assert decode(content, charset) == text


def test_plain_text_keeps_its_lines() -> None:
    assert page_of_plain("a  b\n\n\nc <p>", 100).text == "a b\nc <p>"
