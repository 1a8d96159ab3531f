"""Evaluate questions on a running rollout server (`POST /v1/episodes`), at one policy version.

All questions are in one streamed request, so the server uses one version for all of them. It generates with the
engines of the run and scores with the run's rewards; the episodes are not trained on.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ForayError, UserError
from protocol.messages import Question
from protocol.runtime.http.auth import variable
from protocol.runtime.http.client import LARGEST_ANSWER, ask
from protocol.runtime.timing import backoff_s

Episode = dict[str, Any]
RECONNECTS = 5
"""Maximum number of consecutive connections that fail without a completed episode."""
RECONNECT_S, LONGEST_RECONNECT_S = 1.0, 60.0
"""First and longest sleep before a retry, in seconds; it doubles with each retry."""


class Dropped(ForayError):
    """The connection ended before all episodes arrived."""


class NoServer(UserError):
    """No server listens at the URL."""


@dataclass
class EvalScore:
    """The episodes of an evaluation and their means."""

    episodes: list[Episode] = field(default_factory=list)

    @property
    def valid(self) -> list[Episode]:
        """Return the episodes that the policy itself ended; the others carry no information about it."""
        return [e for e in self.episodes if not (is_failed(e) or is_too_long(e))]

    @property
    def failed(self) -> int:
        """Return the number of episodes that the infrastructure ended."""
        return sum(map(is_failed, self.episodes))

    @property
    def too_long(self) -> int:
        """Return the number of episodes whose prompt leaves no room for an answer with the server's settings."""
        return sum(map(is_too_long, self.episodes))

    @property
    def means(self) -> dict[str, float]:
        """Return the mean of each reward over the valid episodes that have it, like the server's `em`."""
        found: dict[str, list[float]] = {}
        for episode in self.valid:
            for name, value in episode.get("rewards", {}).items():
                found.setdefault(name, []).append(float(value))
        return {name: sum(values) / len(values) for name, values in sorted(found.items())}

    @property
    def versions(self) -> dict[str, int]:
        """Return policy version -> number of valid episodes; several versions make the score invalid."""
        return dict(sorted(Counter(str(e.get("version", "")) for e in self.valid).items()))

    def mean(self, name: str) -> float:
        """Return the mean of a field of the episodes (`searches`, `turns`)."""
        values = [float(e.get(name, 0.0)) for e in self.episodes]
        return sum(values) / len(values) if values else 0.0


def is_failed(episode: Episode) -> bool:
    """Return whether the infrastructure ended the episode, so that a retry may succeed."""
    return episode.get("status") in ("failed", "stale") and not is_too_long(episode)


def is_too_long(episode: Episode) -> bool:
    """Return whether the prompt left no room for an answer; a retry would not help."""
    return episode.get("cause") == "prompt_too_long"


def answered(questions: Sequence[Question], episodes: Sequence[Episode], n: int) -> list[Episode]:
    """Return the `episodes` of questions that are complete: `n` episodes, none of them failed."""
    wanted = {question.id for question in questions}
    found = {(e["question_id"], e["index"]): e for e in episodes if e["question_id"] in wanted and not is_failed(e)}
    counts = Counter(question for question, _ in found)
    return [e for (question, _), e in found.items() if counts[question] >= n]


def evaluate(
    url: str,
    questions: Sequence[Question],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    search: bool = True,
    concurrency: int = 64,
    timeout_s: float = 600.0,
    version: str = "",
    done: Sequence[Episode] = (),
    each: Callable[[Episode], None] = lambda episode: None,
) -> EvalScore:
    """Evaluate `questions`, `n` episodes each, on the rollout server at `url`. Return the score, in their order.

    temperature  0 is greedy
    top_p, top_k  sample from the most likely tokens: those with total probability top_p, at most top_k (-1: any number)
    search       False: every search returns nothing
    concurrency  maximum episodes in flight
    timeout_s    timeout for the next episode
    version      policy version to use, e.g. "1.25". "": the one that most engines have
    done         episodes of an earlier call, whose questions are not evaluated again
    each         called with each episode as it ends
    After a lost connection the remaining questions are sent again; the versions show whether the policy changed
    meanwhile. Raises UserError if no server answers at `url`, ForayError if the server refuses or cannot hold the
    version, Dropped if connections keep breaking.
    """
    ids = Counter(question.id for question in questions)
    if twice := [id_ for id_, count in ids.items() if count > 1]:
        raise UserError(
            f"{len(twice)} question ids are not unique, for example {twice[0]!r}", todo="give each question its own id"
        )
    episodes = answered(questions, done, n)
    how: dict[str, Any] = {"n": n, "temperature": temperature, "top_p": top_p, "top_k": top_k, "search": search}
    how |= {"concurrency": concurrency} | ({"version": version} if version else {})
    failures, came = 0, False
    while True:
        have = {e["question_id"] for e in episodes}
        open_ = [question for question in questions if question.id not in have]
        if not open_:
            break
        fresh: list[Episode] = []
        try:
            for episode in _stream(url, open_, how, timeout_s):
                fresh.append(episode)
                each(episode)
            episodes += fresh
            break
        except (Dropped, NoServer):
            kept = answered(open_, fresh, n)
            came, failures = came or bool(fresh), 0 if kept else failures + 1
            if failures > RECONNECTS or not came:
                raise
            episodes += kept
            time.sleep(backoff_s(failures + 1, RECONNECT_S, LONGEST_RECONNECT_S))
    order = {question.id: i for i, question in enumerate(questions)}
    return EvalScore(sorted(episodes, key=lambda e: (order[e["question_id"]], e["index"])))


def _stream(url: str, questions: Sequence[Question], how: dict[str, Any], timeout_s: float) -> Iterator[Episode]:
    """Yield episodes as they end, from one request at one version. Raises what `evaluate` raises."""
    url = f"{url.rstrip('/')}/v1/episodes"
    asked = [{"id": q.id, "question": q.text, "answers": list(q.answers), "meta": q.meta} for q in questions]
    body = how | {"questions": asked, "pin": True, "stream": True}
    try:
        with ask(url, "operator", body=json.dumps(body).encode(), timeout_s=timeout_s) as response:
            yield from _events(response, {question.id for question in questions}, url)
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace").strip()
        if error.code in (401, 403):
            raise UserError(
                f"{url} answered {error.code}",
                why=detail,
                todo=f"export {variable('operator')} with the server's token",
            ) from None
        raise ForayError(f"{url} answered {error.code}: {detail}") from None
    except TimeoutError:
        raise ForayError(f"{url}: no episode ended within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        raise NoServer(
            f"no rollout server answers at {url}", why=str(error.reason), todo="start the run, or correct the URL"
        ) from None
    except (http.client.HTTPException, ConnectionError) as error:
        raise Dropped(f"{url}: the connection broke: {type(error).__name__}: {error}") from None


def _events(response: http.client.HTTPResponse, asked: Set[str], url: str) -> Iterator[Episode]:
    """Yield the episodes of server-sent events. Raises ForayError for `event: error`, Dropped without a summary."""
    kind = ""
    while line := response.readline(LARGEST_ANSWER + 1):
        if len(line) > LARGEST_ANSWER:
            raise ForayError(f"{url} sent an event of more than {LARGEST_ANSWER} bytes")
        name, _, value = line.decode(errors="replace").rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data" and kind == "summary":
            return
        elif name == "data":
            yield _episode(value, asked, url, error=kind == "error")
    raise Dropped(f"{url}: the stream ended before its summary")


def _episode(data: str, asked: Set[str], url: str, *, error: bool) -> Episode:
    """Return the episode of an event. Raises ForayError for an error or another question than `asked`."""
    try:
        event = json.loads(data)
        if error:
            raise ForayError(f"the evaluation ended early: {event['error']}")
        if event["question_id"] in asked and isinstance(event["index"], int):
            return dict(event)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ForayError(f"{url} sent what is no episode of these questions: {data[:80]!r}")
