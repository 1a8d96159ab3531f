"""Trajectories while they are generated.

GET /v1/live             JSON: the groups in flight and, of each trajectory, turns, tokens, searches and what it does
GET /v1/live/trajectory  server-sent events of one trajectory (?seq=, ?index=) from its prompt to its end

Events of a trajectory, with JSON as data:

    start    seq, attempt, index, question
    segment  the text of a segment as it grows. `append`: `text` continues the text of `segment`; else it replaces it
             (its first event; tokens of an engine that failed may be sampled again). `complete`: the last event of the
             segment, with the facts of a turn (engine, version, finish_reason) or of a search (query, error, ...)
    end      status, cause, answer, reward; status null: the task was released, another server or attempt begins again

The texts are those of the policy and of passages, untrusted: a page must not insert them as HTML.

Nothing is queued: a watcher compares its position with the transcript every POLL_S, so that one that reads slowly
delays neither generation nor others. After WRITE_S it is disconnected. Cost: of a watcher O(tokens of its segment) each
POLL_S; of the list O(segments in flight), without decoding, and other tasks run between two groups.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from protocol.messages import Owner, Segment
from protocol.runtime.http import sse
from rollout_server.rollout.live import LiveGroup, LiveGroups, LiveTrajectory

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Interval at which a trajectory is compared with what its watcher has."""
WRITE_S = 5.0
"""A watcher that reads nothing for this long is disconnected."""
ALIVE_S = 15.0
"""A comment is sent after this long without an event, so that both sides notice a lost connection."""
WATCHERS = 16
"""Maximum number of trajectories watched at the same time."""
SHOWN_CHARS = 500
"""Length to which questions and queries are cut in the list of groups."""

TurnSoFar = Callable[[str], tuple[str, list[int]] | None]
"""Returns engine and tokens of the turn in progress of a session (`Router.turn_so_far`)."""
CountSoFar = Callable[[str], tuple[str, int] | None]
"""Returns engine and number of tokens (`Router.count_so_far`)."""
Decode = Callable[[Sequence[int]], str]


class LiveFeed:
    """What the two routes answer."""

    def __init__(self, groups: LiveGroups, turn_so_far: TurnSoFar, count_so_far: CountSoFar, decode: Decode) -> None:
        self._groups, self._turn_so_far, self._count_so_far, self._decode = groups, turn_so_far, count_so_far, decode
        self.watchers = 0

    async def listing(self) -> dict[str, Any]:
        """Return the groups in flight, lowest seq first."""
        now, groups = time.monotonic(), []
        for seq, group in sorted(self._groups.items()):
            groups.append(
                {
                    "seq": seq,
                    "attempt": group.task.attempt,
                    "question_id": group.task.question.id,
                    "question": group.task.question.text[:SHOWN_CHARS],
                    "seconds": round(now - group.started, 3),
                    "trajectories": [self._row(index, one) for index, one in enumerate(group.trajectories)],
                }
            )
            await asyncio.sleep(0)
        return {"watchers": self.watchers, "groups": groups}

    def _row(self, index: int, one: LiveTrajectory) -> dict[str, Any]:
        segments = one.transcript.segments if one.transcript else ()
        turn = self._count_so_far(one.session)
        engine, tokens = turn or ("", 0)
        searches = [s for s in segments if s.owner is Owner.ENVIRONMENT and s.query and not s.tool]
        if one.ended is not None:
            state = "ended"
        elif turn is not None:
            state = "generating" if engine else "waiting"  # for an engine
        else:  # a search, a tool, the reward
            state = "acting" if segments and segments[-1].owner is Owner.POLICY else "waiting"
        return {
            "index": index,
            "state": state,
            "status": str(one.ended.status) if one.ended else None,
            "turns": sum(s.owner is Owner.POLICY for s in segments),
            "tokens": sum(len(s.ids) for s in segments) + tokens,
            "searches": len(searches),
            "last_query": searches[-1].query[:SHOWN_CHARS] if searches else "",
            "engine": engine,
        }

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Stream one trajectory until it ends or the client leaves."""
        try:
            seq, index = (int(request.query[name]) for name in ("seq", "index"))
        except (KeyError, ValueError):
            return web.json_response({"error": "seq and index must be numbers"}, status=400)
        group = self._groups.get(seq)
        if group is None or not 0 <= index < len(group.trajectories):
            return web.json_response({"error": f"seq {seq}, index {index} is not in flight here"}, status=404)
        if self.watchers >= WATCHERS:
            return web.json_response({"error": f"{WATCHERS} trajectories are watched already"}, status=503)
        response = web.StreamResponse(headers=sse.HEADERS)
        self.watchers += 1
        try:
            await response.prepare(request)
            await self._stream(request, response, group, index)
        except ConnectionResetError as error:
            log.info("a watcher of seq %d was disconnected: %s", seq, error)
        finally:
            self.watchers -= 1
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, group: LiveGroup, index: int) -> None:
        one, question = group.trajectories[index], group.task.question
        view = _View(one, self._turn_so_far, self._decode)
        start = {"seq": group.task.seq, "attempt": group.task.attempt, "index": index, "question": question.text}
        await _send(request, response, _event("start", start))
        sent_at = time.monotonic()
        while True:
            # read before the events: what is appended after the last look would be lost
            over = one.ended is not None or self._groups.get(group.task.seq) is not group
            for event in view.new():
                await _send(request, response, _event("segment", event))
                sent_at = time.monotonic()
            if over:
                break
            if time.monotonic() - sent_at >= ALIVE_S:
                await _send(request, response, sse.KEEPALIVE)
                sent_at = time.monotonic()
            await asyncio.sleep(POLL_S)
        await _send(request, response, _event("end", _result(one)))
        await sse.end(response)


class _View:
    """What one watcher has of a trajectory: complete segments, and the text of the one after."""

    def __init__(self, one: LiveTrajectory, turn_so_far: TurnSoFar, decode: Decode) -> None:
        self._one, self._turn_so_far, self._decode = one, turn_so_far, decode
        self._complete = 0
        self._sent = ""
        self._tokens = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call."""
        segments = self._one.transcript.segments if self._one.transcript else ()
        for segment in segments[self._complete :]:
            text = self._decode(segment.ids.tolist())
            yield self._change(str(segment.owner), text, len(segment.ids)) | _facts(segment) | {"complete": True}
            self._complete, self._sent, self._tokens = self._complete + 1, "", 0
        _, ids = self._turn_so_far(self._one.session) or ("", [])
        if len(ids) != self._tokens:
            # the first bytes of a character decode to a replacement character until the rest arrives
            yield self._change(str(Owner.POLICY), self._decode(ids).rstrip("\ufffd"), len(ids)) | {"complete": False}

    def _change(self, owner: str, text: str, tokens: int) -> dict[str, Any]:
        append = bool(self._sent) and text.startswith(self._sent)
        shown = text[len(self._sent) :] if append else text
        self._sent, self._tokens = text, tokens
        return {"segment": self._complete, "owner": owner, "text": shown, "append": append, "tokens": tokens}


def _facts(segment: Segment) -> dict[str, Any]:
    """Return what is known about a complete segment besides its text."""
    if segment.owner is Owner.POLICY:
        version = "+".join(dict.fromkeys(span.version.label for span in segment.spans))
        return {"engine": segment.engine, "version": version, "finish_reason": segment.finish_reason}
    if segment.owner is Owner.ENVIRONMENT:
        passages = list(segment.passage_ids)
        return {"query": segment.query, "tool": segment.tool, "error": segment.error, "passage_ids": passages}
    return {}


def _result(one: LiveTrajectory) -> dict[str, Any]:
    ended = one.ended
    if ended is None:
        return {"status": None, "cause": "released", "answer": "", "reward": 0.0}
    return {"status": str(ended.status), "cause": ended.cause, "answer": ended.answer, "reward": ended.reward}


def _event(kind: str, data: dict[str, Any]) -> str:
    return sse.event(kind, json.dumps(data))


async def _send(request: web.Request, response: web.StreamResponse, text: str) -> None:
    await sse.write(request, response, text.encode(), WRITE_S)
