"""What the scripted policy writes, and how an engine finds out from the ids alone where it is. Pure but for `claim`.

    question : PLAY SEED GROUP ?                        the prompt: one question a group
    T <think> a b c ... </think> <search> SEED T U </search>   turn U of trajectory T, as long as was drawn
    <information> ... </information>                    what the environment answers
    T <think> a b c ... </think> <answer> T </answer>   the last turn

The trajectories of a group have one prompt, so the first turn gives each its number; from then on it stands in its
own ids. Whoever continues a turn from the ids so far, this engine or another, writes exactly what is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deploy.bench.batching import Speed
from deploy.bench.draws import Draws


@dataclass(frozen=True)
class Place:
    """Where a request is: `written` tokens of turn `turn` of trajectory `trajectory` are in its ids already."""

    play: int
    seed: int
    trajectory: int
    turn: int
    written: int

    @property
    def first(self) -> bool:
        """Whether its ids hold the question alone: the number of the trajectory has just been claimed."""
        return self.turn == 0 and self.written == 0


@dataclass(frozen=True)
class Script:
    """One benchmark's policy. `directory` holds the model's tokenizer, and `claims`; `speeds`: one of each engine."""

    directory: Path
    draws: Draws
    group_size: int
    speeds: tuple[Speed, ...]
    seeds: tuple[int, ...]

    @classmethod
    def load(cls, path: Path) -> Script:
        """What `save` wrote."""
        given = json.loads(path.read_text())
        return cls(
            Path(given["directory"]),
            Draws(**given["draws"]),
            given["group_size"],
            tuple(Speed(**speed) for speed in given["speeds"]),
            tuple(given["seeds"]),
        )

    def save(self, path: Path) -> None:
        """For the processes that play parts in it."""
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
        """Numbers that the tokenizer must know as words."""
        return [str(n) for n in sorted({*range(max(self.draws.trajectories, 100)), *self.seeds})]

    def question(self, play: int, seed: int, group: int) -> str:
        """The text of a question. `play` tells repetitions on the same draws apart."""
        return f"{play} {seed} {group} ?"

    def turn(self, place: Place) -> list[str]:
        """The words of a whole turn."""
        number = str(place.trajectory)
        if place.turn == self.draws.turns - 1:
            end = ["<answer>", number, "</answer>"]
        else:
            end = ["<search>", str(place.seed), number, str(place.turn), "</search>"]
        tokens = self.draws.tokens(place.seed, place.trajectory, place.turn)
        thought = max(1, tokens - len(end) - 3)
        return [number, "<think>", *("abcdefgh"[i % 8] for i in range(thought)), "</think>", *end]

    def rest(self, ids: Sequence[int]) -> tuple[Place, list[int]]:
        """Where `ids` are, and the ids that are still missing in this turn. Raises ValueError for any other ids."""
        asked, told = self.ids["?"], self.ids["</information>"]
        start = list(ids).index(asked)
        play, seed, group = (int(self._words[i]) for i in ids[start - 3 : start])
        turn = list(ids).count(told)
        begun = len(ids) if turn == 0 else len(ids) - list(reversed(ids)).index(told)
        written = len(ids) - (start + 1 if turn == 0 else begun)
        if len(ids) > start + 1:
            trajectory = int(self._words[ids[start + 1]])
        else:
            trajectory = group * self.group_size + self._claim(play, seed, group)
        place = Place(play, seed, trajectory, turn, written)
        return place, [self.ids[word] for word in self.turn(place)[written:]]

    def _claim(self, play: int, seed: int, group: int) -> int:
        """A number within the group that nobody had yet. A file that only one process can create is a claim."""
        for member in range(self.group_size):
            try:
                os.close(os.open(self.directory / "claims" / f"{play}-{seed}-{group}-{member}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return member
        raise ValueError(f"group {group} has {self.group_size} trajectories, and one more asks for its first turn")

    def release(self, place: Place) -> None:
        """Give the number of a first turn back, of which no client has seen a token."""
        group, member = divmod(place.trajectory, self.group_size)
        for claim in (self.directory / "claims").glob(f"{place.play}-{place.seed}-{group}-{member}"):
            claim.unlink()

    @cached_property
    def ids(self) -> dict[str, int]:
        """Word -> id, of the tokenizer in `directory`."""
        spec = json.loads((self.directory / "tokenizer.json").read_text())
        table: dict[str, int] = dict(spec["model"]["vocab"])
        return table | {token["content"]: int(token["id"]) for token in spec.get("added_tokens") or []}

    @cached_property
    def _words(self) -> dict[int, str]:
        return {index: word for word, index in self.ids.items()}
