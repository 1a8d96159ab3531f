"""The text of the scripted policy, and the position of a request in it, from its ids. Pure except the claims.

    question : PLAY SEED GROUP ?                        the prompt: one question per group
    T <think> a b c ... </think> <search> SEED T U </search>   turn U of trajectory T, of random length
    <information> ... </information>                    the environment's answer
    T <think> a b c ... </think> <answer> T </answer>   the last turn

The trajectories of a group share a prompt, so the first turn assigns each its number, which its ids contain from then
on. Any engine that continues a turn from the ids so far writes exactly the rest.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.rollout.batching import Speed


@dataclass(frozen=True)
class Draws:
    """Lognormal lengths and latencies. `scale` multiplies all times, including those of engines (`scaled`).

    trajectories  numbered from 0
    turns         turns per trajectory; all but the last end in a search
    turn_tokens   median tokens per turn
    """

    trajectories: int
    turns: int
    turn_tokens: int = 64
    scale: float = 1.0
    tokens_sigma: float = 0.5
    least_tokens: int = 16
    most_tokens: int = 400
    search_median_s: float = 0.1
    search_sigma: float = 1.0

    def tokens(self, seed: int, trajectory: int, turn: int) -> int:
        """Return the number of tokens of this turn."""
        drawn = self._draw("tokens", seed, trajectory, turn, self.turn_tokens, self.tokens_sigma)
        return min(max(round(drawn), self.least_tokens), self.most_tokens)

    def search_s(self, seed: int, trajectory: int, turn: int) -> float:
        """Return the duration of the search at the end of this turn, in seconds."""
        return self.scale * self._draw("search", seed, trajectory, turn, self.search_median_s, self.search_sigma)

    def _draw(self, what: str, seed: int, trajectory: int, turn: int, median: float, sigma: float) -> float:
        # a text as a seed is hashed with sha512: the same on every machine and in every process
        normal = random.Random(f"{what}/{seed}/{trajectory}/{turn}").gauss(0.0, 1.0)
        return median * math.exp(sigma * normal)


@dataclass(frozen=True)
class Faults:
    """Faults of the engines during a play, in seconds since its start. Only one engine pauses at a time.

    down     engine that is down from `down_s` for `away_s`, and loses its requests and its cache; -1: none
    swaps_s  start times of the weight updates; each engine pauses for `pause_s` and loses its cache
    """

    down: int = -1
    down_s: float = 0.0
    away_s: float = 0.0
    swaps_s: tuple[float, ...] = ()
    pause_s: float = 0.0

    def pauses(self, engine: int) -> list[tuple[float, float]]:
        """Return (begin, end) of each pause of `engine`."""
        begins = (swap + engine * self.pause_s for swap in self.swaps_s)
        return [(begin, begin + self.pause_s) for begin in begins]

    def lost_s(self, engine: int) -> float:
        """Return the seconds in which `engine` computes nothing."""
        return self.pause_s * len(self.swaps_s) + (self.away_s if engine == self.down else 0.0)


@dataclass(frozen=True)
class ScriptPosition:
    """The position of a request: its ids contain `written` tokens of turn `turn` of trajectory `trajectory`."""

    play: int
    seed: int
    trajectory: int
    turn: int
    written: int

    @property
    def first(self) -> bool:
        """Return whether its ids contain only the question: the trajectory's number has just been claimed."""
        return self.turn == 0 and self.written == 0


@dataclass(frozen=True)
class Script:
    """The policy of one benchmark. `directory` holds the tokenizer and `claims`; `speeds`: one per engine."""

    directory: Path
    draws: Draws
    group_size: int
    speeds: tuple[Speed, ...]
    seeds: tuple[int, ...]

    @classmethod
    def load(cls, path: Path) -> Script:
        """Return the script that `save` wrote."""
        given = json.loads(path.read_text())
        return cls(
            Path(given["directory"]),
            Draws(**given["draws"]),
            given["group_size"],
            tuple(Speed(**speed) for speed in given["speeds"]),
            tuple(given["seeds"]),
        )

    def save(self, path: Path) -> None:
        """Write the script for the other processes."""
        given: dict[str, Any] = {
            "directory": str(self.directory),
            "draws": vars(self.draws),
            "group_size": self.group_size,
            "speeds": [vars(speed) for speed in self.speeds],
            "seeds": self.seeds,
        }
        path.write_text(json.dumps(given))

    @property
    def words(self) -> list[str]:
        """Return the numbers that must be words of the tokenizer."""
        return [str(n) for n in sorted({*range(max(self.draws.trajectories, 100)), *self.seeds})]

    def question(self, play: int, seed: int, group: int) -> str:
        """Return the text of a question. `play` distinguishes repetitions of the same draws."""
        return f"{play} {seed} {group} ?"

    def turn(self, place: ScriptPosition) -> list[str]:
        """Return the words of a complete turn."""
        number = str(place.trajectory)
        if place.turn == self.draws.turns - 1:
            end = ["<answer>", number, "</answer>"]
        else:
            end = ["<search>", str(place.seed), number, str(place.turn), "</search>"]
        tokens = self.draws.tokens(place.seed, place.trajectory, place.turn)
        thought = max(1, tokens - len(end) - 3)
        return [number, "<think>", *("abcdefgh"[i % 8] for i in range(thought)), "</think>", *end]

    def rest(self, ids: Sequence[int]) -> tuple[ScriptPosition, list[int]]:
        """Return the position of `ids` and the remaining ids of this turn. Raises ValueError for any other ids."""
        question_mark, observed = self.ids["?"], self.ids["</information>"]
        start = list(ids).index(question_mark)
        play, seed, group = (int(self._words[i]) for i in ids[start - 3 : start])
        turn = list(ids).count(observed)
        begun = len(ids) if turn == 0 else len(ids) - list(reversed(ids)).index(observed)
        written = len(ids) - (start + 1 if turn == 0 else begun)
        if len(ids) > start + 1:
            trajectory = int(self._words[ids[start + 1]])
            if turn == 0:
                self._in_doubt(play, seed, *divmod(trajectory, self.group_size)).unlink(missing_ok=True)
        else:
            trajectory = group * self.group_size + self._claim(play, seed, group)
        place = ScriptPosition(play, seed, trajectory, turn, written)
        return place, [self.ids[word] for word in self.turn(place)[written:]]

    def _claim(self, play: int, seed: int, group: int) -> int:
        """Return an unused number within the group. A file that only one process can create is a claim.

        If all are claimed, a client lost the number that it was sent: take one that is in doubt.
        """
        for member in range(self.group_size):
            try:
                os.close(os.open(self._claim_of(play, seed, group, member), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return member
        for member in range(self.group_size):
            with suppress(FileNotFoundError):
                self._in_doubt(play, seed, group, member).unlink()
                return member
        raise ValueError(f"group {group} has only {self.group_size} trajectories, but another first turn was requested")

    def release(self, place: ScriptPosition, *, sent: bool) -> None:
        """Release the number of a first turn that ended early. sent: it is in doubt whether the client received it."""
        member = (place.play, place.seed, *divmod(place.trajectory, self.group_size))
        if sent:
            self._in_doubt(*member).touch()
        else:
            self._claim_of(*member).unlink(missing_ok=True)

    def _claim_of(self, play: int, seed: int, group: int, member: int) -> Path:
        return self.directory / "claims" / f"{play}-{seed}-{group}-{member}"

    def _in_doubt(self, play: int, seed: int, group: int, member: int) -> Path:
        return self.directory / "claims" / f"{play}-{seed}-{group}-{member}.in-doubt"

    @cached_property
    def ids(self) -> dict[str, int]:
        """Return word -> id of the tokenizer in `directory`."""
        spec = json.loads((self.directory / "tokenizer.json").read_text())
        table: dict[str, int] = dict(spec["model"]["vocab"])
        return table | {token["content"]: int(token["id"]) for token in spec.get("added_tokens") or []}

    @cached_property
    def _words(self) -> dict[int, str]:
        return {index: word for word, index in self.ids.items()}
