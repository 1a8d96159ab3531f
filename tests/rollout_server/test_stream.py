"""Streams of events as tokens: however the bytes are cut, whatever kind of chunks, the same tokens or an error."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.versions import PolicyVersion
from rollout_server.engine import decoding as stream
from rollout_server.engine.base import FAULTS, EngineError
from rollout_server.engine.decoding import ReceivedTokens, SseParser, StreamDecoder
from tests.support.fake_engine import Generation

IDS = [7, 3, 900, 3, 3, 12, 0, 44, 5, 6, 8, 1]


def chunks(
    ids: list[int], every: int, *, incremental: bool = False, exact: bool = False, swap: int = 99
) -> list[dict[str, Any]]:
    """What SGLang sends; the label changes at token `swap`."""
    body = {"rid": "r", "input_ids": [1], "sampling_params": {"max_new_tokens": len(ids)}}
    generation, sent, said = Generation(body, ids), 0, []
    for n in range(1, len(ids) + 1):
        generation.labels.append("1.5" if n <= swap else "1.6")
        if n == len(ids) or n % every == 1 % every:
            start, sent = (sent if incremental else 0), n
            said.append(generation.chunk(generation.labels[-1], start=start, exact=exact))
    return said


def raw(said: list[Any], separators: tuple[str, str] = (", ", ": ")) -> bytes:
    return b"".join(b"data: " + json.dumps(c, separators=separators).encode() + b"\n\n" for c in said)


def read(data: bytes, cuts: list[int] = [], **facts: Any) -> ReceivedTokens:  # noqa: B006
    received = ReceivedTokens("e", len(IDS), **({"vocab_size": 1000, "label": "1.5"} | facts))
    reader = StreamDecoder(received)
    places = [0, *sorted(cuts), len(data)]
    for a, b in itertools.pairwise(places):
        reader.feed(data[a:b])
    reader.flush()
    return received


@given(
    every=st.integers(1, 13),
    incremental=st.booleans(),
    exact=st.booleans(),
    compact=st.booleans(),
    swap=st.integers(1, 99),
    cuts=st.lists(st.integers(0, 4000), max_size=8),
    lost=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_every_cut_of_every_kind_of_stream_gives_the_same_tokens(
    every: int, incremental: bool, exact: bool, compact: bool, swap: int, cuts: list[int], lost: int
) -> None:
    said = chunks(IDS, every, incremental=incremental, exact=exact, swap=swap)
    kept = said[: max(0, len(said) - lost)]
    data = raw(kept, (",", ":") if compact else (", ", ": "))
    received = read(data, [c for c in cuts if c <= len(data)])
    n = kept[-1]["meta_info"]["completion_tokens"] if kept else 0
    assert received.ids == IDS[:n] and received.logprobs == [-0.25] * n
    assert received.finish_reason == ("" if lost else "length")
    truth = [PolicyVersion(1, 5) if i < swap else PolicyVersion(1, 6) for i in range(n)]
    said_so = [version for version, a, b in received.spans() for _ in range(a, b)]
    assert said_so == truth[: len(said_so)], "no token is ever given a version that did not sample it"
    if not lost or exact or swap >= n:
        assert len(said_so) == n, "nothing is dropped where there is no doubt"


def test_of_a_long_stream_only_a_few_chunks_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    real = json.loads
    monkeypatch.setattr(stream.json, "loads", lambda payload: decoded.append(payload) or real(payload))
    assert read(raw(chunks(IDS, 1))).ids == IDS
    assert len(decoded) == 3
    decoded.clear()
    assert read(raw(chunks(IDS, 1)[:-1])).ids == IDS[:-1], "without its end the last chunk that came is decoded"
    assert len(decoded) == 3


def test_a_chunk_that_was_put_off_is_checked_as_any_other() -> None:
    said = chunks(IDS, 1)[:-1]
    said[-1]["meta_info"]["output_token_logprobs"][2][0] = math.nan
    said[-1]["meta_info"]["output_token_logprobs"][-1][0] = math.nan
    with pytest.raises(EngineError) as caught:
        read(raw(said))
    assert caught.value.cause == "bad_output"


@pytest.mark.parametrize(
    "second",
    [
        {"output_ids": [8, 3, 900]},
        {"output_ids": [7, 3, 900, 4]},
        {"output_ids": []},
        {"output_ids": None},
        {"output_ids": [7, 3, True], "meta_info": {"output_token_logprobs": [[-1, 7], [-1, 3], [-1, True]]}},
        {"output_ids": [7, 3, 4.0], "meta_info": {"output_token_logprobs": [[-1, 7], [-1, 3], [-1, 4.0]]}},
        {"meta_info": {"completion_tokens": 2}},
        {"meta_info": {"completion_tokens": "3"}},
        {"meta_info": {"output_token_logprobs": [[-1, 7], [-1, 3], ["-1", 900]]}},
        {"meta_info": {"output_token_logprobs": [[-1, 7], [-1, 3], [10**400, 900]]}},
        {"meta_info": {"output_token_logprobs": [[-1, 7], [-1, 3]]}},
        {"meta_info": {"output_token_logprobs": None}},
        {"meta_info": {"weight_versions": [{"version": "1.5", "start": 0, "end": 4}]}},
        {"meta_info": {"finish_reason": "stop"}},
        {"meta_info": None},
    ],
)
@pytest.mark.fault(21)
def test_a_chunk_that_contradicts_the_one_before_or_itself_is_bad_output(second: dict[str, Any]) -> None:
    first, sound = chunks(IDS, 1)[1:3]
    meta = second.get("meta_info", {})
    broken = sound | second | {"meta_info": None if meta is None else sound["meta_info"] | meta}
    with pytest.raises(EngineError) as caught:
        read(raw([first, broken]))
    assert caught.value.cause == "bad_output" and caught.value.fault == "engine"


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_at_all_can_do_more_than_raise_an_engine_error(data: bytes, cut: int) -> None:
    try:
        received = read(raw(chunks(IDS, 4)[:1]) + data, [cut])
    except EngineError as error:
        assert error.cause in FAULTS
    else:
        assert received.ids == IDS[:1]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["output_ids", "meta_info", "finish_reason", "error", "type"]), inner)
        ),
        max_leaves=12,
    )
)
@pytest.mark.fault(21)
def test_no_json_at_all_can_do_more_than_raise_an_engine_error(value: Any) -> None:
    received = ReceivedTokens("e", 4)
    try:
        received.take(value)
    except EngineError as error:
        assert error.cause in FAULTS
    assert len(received.ids) == len(received.logprobs) <= 4


@pytest.mark.parametrize("cut", range(0, 12, 3))
def test_comments_names_and_carriage_returns_are_no_garbage(cut: int) -> None:
    events = SseParser("e")
    data = b": ping\r\n\r\nevent: x\nid: 7\nretry: 5\ndata:{}\r\n\r\ndata: [DONE]\n\n"
    assert events.feed(data[:cut]) + events.feed(data[cut:]) == [b"{}", b"[DONE]"]


def test_an_adapters_version_goes_before_what_the_engine_says() -> None:
    received = read(raw(chunks(IDS, 4)), fixed=PolicyVersion(2, 9))
    assert received.spans() == ((PolicyVersion(2, 9), 0, len(IDS)),)


def test_the_first_chunk_under_another_label_than_was_known_is_in_doubt() -> None:
    said = chunks(IDS, 4)
    assert read(raw(said[:2]), label="1.4").spans() == ()
    assert read(raw(said), label="1.4").spans() == ((PolicyVersion(1, 5), 0, len(IDS)),), "the end says it"


def test_tokens_before_a_chunk_of_another_version_that_adds_none_keep_their_version() -> None:
    said = chunks(IDS[:4], 4, incremental=True)[0]
    for step in range(30):  # the order of a set of labels depends on their hashes
        first = said | {"meta_info": said["meta_info"] | {"weight_version": f"1.{step}"}}
        rest = {"weight_version": f"1.{step + 1}", "output_token_logprobs": [], "completion_tokens": 1}
        received = read(raw([first, {"output_ids": [], "meta_info": said["meta_info"] | rest}]), label=f"1.{step}")
        assert received.ids == IDS[:1] and received.spans() == ((PolicyVersion(1, step), 0, 1),)


def test_an_engine_that_sends_a_new_label_with_every_chunk_costs_no_memory() -> None:
    said = chunks(IDS[:4], 4, incremental=True)[0]
    meta = said["meta_info"] | {"output_token_logprobs": [], "completion_tokens": 0}
    received = ReceivedTokens("e", 8)
    for number in range(100):
        received.take({"output_ids": [], "meta_info": meta | {"weight_version": f"{number}" * 1000}})
    assert len(received._labels) == 2
