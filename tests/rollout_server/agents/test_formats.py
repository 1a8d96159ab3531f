"""Calls and thoughts, read from what models write in each format."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.agents.formats import split_thoughts
from rollout_server.agents.renderer import Said
from tests.rollout_server.agents.templates import APPENDED, IN_CYCLE
from tests.support.chat_tokenizers import TOOLS, Chat, make_chat

ALL = APPENDED | IN_CYCLE
HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "q"}}\n</tool_call>'
XML = "<tool_call>\n<function=search>\n<parameter=query>\nq\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "search", "parameters": {"query": "q"}}'
NEMO = '[TOOL_CALLS][{"name": "search", "arguments": {"query": "q"}, "id": "aBcDeF123"}]'
GLM = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>q</arg_value>\n</tool_call>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
OSS = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "q"}<|call|>'


@cache
def chat(name: str) -> Chat:
    return make_chat(*ALL[name])


def read(name: str, text: str) -> Said:
    known = chat(name)
    return known.renderer.read(known.tokens.encode_trusted(text), TOOLS)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", HERMES + "<|im_end|>", "", 1),
        ("hermes", f"I look.\n{HERMES}\n{HERMES}", "I look.", 2),
        ("hermes", '<tool_call>{"name":"search","arguments":{"query":"q"}}</tool_call>', "", 1),
        ("hermes", HERMES.replace("\n</tool_call>", ""), "", 1),
        ("xml", f"I look.\n\n{XML}", "I look.", 1),
        ("xml", XML + XML, "", 2),
        ("llama", LLAMA, "", 1),
        ("llama", f"<|python_tag|>{LLAMA}<|eom_id|>", "", 1),
        ("moves tools", NEMO, "", 1),
        ("next role ends", f"I look.\n{GLM}<|observation|>", "I look.", 1),
        ("channels", OSS, "", 1),
        ("channels", ANALYSIS + OSS, "", 1),
        (
            "channels",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A.",
            "A.",
            0,
        ),
    ],
)
def test_calls_are_read(name: str, text: str, content: str, calls: int) -> None:
    said = read(name, text)
    assert said.content == content and len(said.calls) == calls
    assert {(call.name, call.arguments) for call in said.calls} == ({("search", '{"query": "q"}')} if calls else set())
    assert len({call.id for call in said.calls}) == calls and all(len(call.id) == 9 for call in said.calls)
    assert (said.reasoning == "Hm.") == ("Hm." in text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "q}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "search", "arguments": "q"}\n</tool_call>'),
        ("hermes", HERMES + '<tool_call>\n{"name": "search", "arguments": {"que'),
        ("hermes", LLAMA),
        ("xml", XML.removesuffix("</function>\n</tool_call>").strip()),
        ("xml", HERMES),
        ("llama", f"An object: {LLAMA}"),
        ("moves tools", "[TOOL_CALLS]search"),
        ("next role ends", "<tool_call>search\n<arg_key>query</arg_key>"),
    ],
)
def test_a_call_that_does_not_parse_stays_text(name: str, text: str) -> None:
    assert read(name, text) == Said(text)


def test_without_tools_calls_are_text() -> None:
    known = chat("hermes")
    assert known.renderer.read(known.tokens.encode_trusted(HERMES), []) == Said(HERMES)


def test_arguments_have_the_types_of_the_tool() -> None:
    lines = (
        "<parameter=query>\n12\n</parameter>\n<parameter=k>\n3\n</parameter>\n<parameter=x>\n[1, null]\n</parameter>\n"
    )
    (call,) = read("xml", f"<tool_call>\n<function=search>\n{lines}</function>\n</tool_call>").calls
    assert json.loads(call.arguments) == {"query": "12", "k": 3, "x": [1, None]}
    (call,) = read("xml", XML.replace("\nq\n", "\n  a\n\n b\n\n")).calls
    assert json.loads(call.arguments) == {"query": "  a\n\n b\n"}, "white space of a value is kept"


def test_an_id_that_the_policy_writes_names_the_call() -> None:
    (call,) = read("moves tools", NEMO).calls
    assert call.id == "aBcDeF123"
    (call,) = read("moves tools", NEMO.replace("aBcDeF123", "x")).calls
    assert call.id != "x" and len(call.id) == 9


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "rest"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a\n</think>\nb", True, "a", "b"),
        ("[THINK]a[/THINK]b", False, "a", "b"),
        ("<think>a", False, "a", ""),
        ("a", True, "a", ""),
        ("a", False, "", "a"),
    ],
)
def test_thoughts_are_apart_from_the_content(text: str, opened: bool, thoughts: str, rest: str) -> None:
    assert split_thoughts(text, opened) == (thoughts, rest)


PIECES = (
    HERMES,
    XML,
    LLAMA,
    NEMO,
    GLM,
    OSS,
    "<think>",
    "</think>",
    "{",
    "}",
    '"',
    "\n",
    "a",
    "<|message|>",
    "[" * 3000,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(name=st.sampled_from(sorted(ALL)), text=st.lists(st.sampled_from(PIECES), max_size=5).map("".join) | st.text())
def test_any_text_is_read(name: str, text: str) -> None:
    said = read(name, text)
    assert all(isinstance(json.loads(call.arguments), dict) for call in said.calls)
