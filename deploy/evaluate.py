"""Score questions through a running rollout server (`POST /v1/episodes`), a block at a time.

The server generates with the engines that train, at their present version, and scores with the run's own rewards;
nothing of it is trained on.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.asking import ask
from protocol.access import variable
from protocol.errors import ForayError, UserError
from protocol.messages import Question


@dataclass
class Score:
    """What came back, added up over blocks. `means`: reward name -> mean over the episodes that voted."""

    episodes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Episodes that ended for reasons of infrastructure: they say nothing of the policy."""
        return sum(1 for e in self.episodes if e.get("status") in ("failed", "stale"))

    @property
    def means(self) -> dict[str, float]:
        """Mean of each reward over the episodes that the policy ended itself."""
        valid = [e for e in self.episodes if e.get("status") not in ("failed", "stale")]
        names = {name for e in valid for name in e.get("rewards", {})}
        return {n: sum(float(e["rewards"].get(n, 0.0)) for e in valid) / len(valid) for n in sorted(names)}

    def mean(self, name: str) -> float:
        """Mean of a number of each episode (`searches`, `turns`)."""
        values = [float(e.get(name, 0.0)) for e in self.episodes]
        return sum(values) / len(values) if values else 0.0


def evaluate(
    url: str,
    questions: Sequence[Question],
    *,
    n: int = 1,
    temperature: float = 1.0,
    search: bool = True,
    block: int = 64,
    timeout_s: float = 600.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """The score of `questions`, `n` episodes each, from the rollout server at `url`.

    temperature  0 is greedy
    search       False: every search comes back empty (what the policy knows by itself)
    progress     called with the number of questions done
    Raises UserError when nobody answers at `url`, ForayError when the server refuses or breaks off.
    """
    score = Score()
    for start in range(0, len(questions), block):
        part = questions[start : start + block]
        body = {
            "questions": [{"id": q.id, "question": q.text, "answers": list(q.answers)} for q in part],
            "n": n,
            "temperature": temperature,
            "search": search,
            "pin": True,
            "stream": False,
        }
        score.episodes += _post(f"{url.rstrip('/')}/v1/episodes", body, timeout_s)["episodes"]
        progress(start + len(part))
    return score


def _post(url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        with ask(url, "operator", body=json.dumps(body).encode(), timeout_s=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace").strip()
        if error.code in (401, 403):
            raise UserError(
                f"{url} answered {error.code}", why=detail, todo=f"export {variable('operator')} as the server has it"
            ) from None
        raise ForayError(f"{url} answered {error.code}: {detail}") from None
    except (urllib.error.URLError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"no rollout server answers at {url}", why=str(reason), todo="start the run, or correct the URL"
        ) from None
    except TimeoutError:
        raise ForayError(f"{url} did not answer within {timeout_s:g} s") from None
    return answer
