"""Demonstrations for the demo's supervised warm start: drills, ideal and imperfect trajectories, as token ids.

A good trajectory looks up a fact, quotes the evidence (`<think> elected mira tolan </think>`) and answers from the
quote, so that answering is plain copying. An imperfect one is well formed but has one of the errors that reinforcement
learning must remove: it guesses, sends the wrong query, reads the wrong fact or stops one hop early. Even then its
quotes are correct, so that imperfect demonstrations do not unlearn copying.

Prompt and environment texts come from `rollout_server.environment.prompts.demo`, so that the ids equal those of the
running system.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foray.demo.world import (
    ALIASED,
    GUESS_THOUGHT,
    ONE_HOP,
    RELATIONS,
    SAID,
    THOUGHT,
    Fact,
    Lookup,
    Puzzle,
    World,
    encode,
)
from rollout_server.environment.prompts import demo

if TYPE_CHECKING:
    import torch

POLICY_WEIGHT = 1.0
ENVIRONMENT_WEIGHT = 0.1
"""Loss weight of observations: names that recur in them are further practice in copying."""


@dataclass
class Demonstration:
    """Token ids, with the loss weight of each token (prompt tokens: 0).

    queries, evidence  positions of the words of each query and of the values of each quote
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    queries: list[slice] = field(default_factory=list)
    evidence: list[slice] = field(default_factory=list)

    def _add(self, text: str, weight: float) -> slice:
        ids = encode(text)
        self.ids += ids
        self.weights += [weight] * len(ids)
        return slice(len(self.ids) - len(ids), len(self.ids))

    def prompt(self, question: str) -> None:
        """Append the prompt with the question."""
        self._add(demo.PROMPT.format(question=question), 0.0)

    def policy(self, text: str) -> None:
        """Append text of the policy."""
        self._add(text, POLICY_WEIGHT)

    def search(self, query: str) -> None:
        """Append a search of the policy."""
        span = self._add(f"<search> {query} </search>", POLICY_WEIGHT)
        self.queries.append(slice(span.start + 1, span.stop - 1))

    def quote(self, fact: Fact) -> None:
        """Append a quote of evidence: the verb and the value."""
        span = self._add(f"<think> {SAID[fact.relation]} {fact.value} </think>", POLICY_WEIGHT)
        self.evidence.append(slice(span.start + 2, span.stop - 1))

    def mute(self, spans: Sequence[slice]) -> None:
        """Remove the loss from these positions."""
        for span in spans:
            self.weights[span] = [0.0] * (span.stop - span.start)

    def answer(self, value: str) -> None:
        """Append the policy's answer."""
        self._add(f"<answer> {value} </answer>", POLICY_WEIGHT)

    def observation(self, world: World, names: Sequence[str]) -> None:
        """Append the passages about `names` as an observation of the environment."""
        passages = [demo.PASSAGE.format(title=name, text=world.text(name)) for name in names]
        text = demo.PASSAGE_SEPARATOR.join(passages) or demo.EMPTY_RESULT
        self._add(demo.OBSERVATION.format(passages=text), ENVIRONMENT_WEIGHT)


@dataclass(frozen=True)
class Scene:
    """A world, its index, and the random generator for demonstrations."""

    world: World
    lookup: Lookup
    rng: random.Random


def query(relation: str, name: str) -> str:
    """Return the search query for a fact."""
    return f"{relation} of {name}"


def _begun(puzzle: Puzzle, thought: str = THOUGHT) -> Demonstration:
    shown = Demonstration()
    shown.prompt(puzzle.question)
    shown.policy(f"<think> {thought} </think>")
    return shown


def _trajectory(
    scene: Scene, puzzle: Puzzle, lookups: Iterable[tuple[str, Fact]], answer: str, topk: int
) -> Demonstration:
    """Send queries in order, quote a fact after each, and answer."""
    shown = _begun(puzzle)
    for wanted, found in lookups:
        shown.search(wanted)
        shown.observation(scene.world, scene.lookup.top(wanted, topk))
        shown.quote(found)
    shown.answer(answer)
    return shown


def _follow(scene: Scene, puzzle: Puzzle, facts: Sequence[Fact], topk: int) -> Demonstration:
    """Look up `facts` in order and answer with the last one."""
    steps = ((query(step.relation, step.name), step.found) for step in scene.world.steps(facts))
    return _trajectory(scene, puzzle, steps, facts[-1].value, topk)


def ideal(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Look up every fact of the chain, quote each, answer with the last."""
    return _follow(scene, puzzle, puzzle.chain, topk)


def guess(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Answer immediately with a random name of this world."""
    shown = _begun(puzzle, GUESS_THOUGHT)
    shown.answer(scene.rng.choice(scene.lookup.names))
    return shown


def _other_fact(scene: Scene, fact: Fact) -> Fact:
    pairs = RELATIONS[scene.world.kind_of[fact.subject]]
    return scene.world.fact(fact.subject, next(relation for relation, _ in pairs if relation != fact.relation))


def wrong_query(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Query the subject's other relation, then quote and answer what was found."""
    return _follow(scene, puzzle, [_other_fact(scene, puzzle.chain[0])], topk)


def wrong_fact(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Find the right passage, but quote and answer its other fact."""
    fact = puzzle.chain[0]
    other = _other_fact(scene, fact)
    return _trajectory(scene, puzzle, [(query(fact.relation, fact.subject), other)], other.value, topk)


def skipped_hop(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Query the last relation of the first subject, which has none, and answer the first value found."""
    first, last = puzzle.chain[0], puzzle.chain[-1]
    return _trajectory(scene, puzzle, [(query(last.relation, first.subject), first)], first.value, topk)


def early_stop(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Do the first hop correctly and answer with its value."""
    return _follow(scene, puzzle, puzzle.chain[:1], topk)


Behaviour = Callable[[Scene, Puzzle, int], Demonstration]
IMPERFECT: dict[int, tuple[tuple[Behaviour, float], ...]] = {
    1: ((ideal, 0.20), (guess, 0.50), (wrong_query, 0.15), (wrong_fact, 0.15)),
    2: ((ideal, 0.15), (guess, 0.50), (skipped_hop, 0.15), (early_stop, 0.20)),
}
"""Number of hops -> behaviours and their shares in the final stage of the warm start."""


def reading_drill(scene: Scene, asked: int = 5) -> Demonstration:
    """Return two or three passages, then questions about them with query, quote and answer: practice in copying."""
    rng, world = scene.rng, scene.world
    shown = Demonstration()
    names = rng.sample(scene.lookup.names, rng.choice((2, 2, 3)))
    if rng.random() < 0.5:
        names = scene.lookup.top(query(*rng.choice(scene.lookup.fact_keys)[::-1]), 2)
        rng.shuffle(names)
    shown.observation(world, names)
    for _ in range(asked):
        name = rng.choice(names)
        subject = world.first_name.get(name, name)
        fact = world.fact(subject, rng.choice(RELATIONS[world.kind_of[subject]])[0])
        # of a renamed subject, the passage under the present name: the first step or the last
        step = world.steps([fact])[-1 if name in world.first_name else 0]
        shown.prompt(ONE_HOP.format(relation=fact.relation, name=name))
        shown.search(query(step.relation, name))
        shown.quote(step.found)
        if step.found.relation == ALIASED:
            shown.search(query(step.relation, step.found.value))
        else:
            shown.answer(fact.value)
    return shown


def practice(scene: Scene, puzzles: dict[int, list[Puzzle]]) -> Demonstration:
    """Return a demonstration of the first stage: half drills, half ideal trajectories."""
    if scene.rng.random() < 0.5:
        return reading_drill(scene)
    return ideal(scene, scene.rng.choice(puzzles[scene.rng.choice(tuple(puzzles))]), _topk(scene))


def imperfect(scene: Scene, puzzles: dict[int, list[Puzzle]]) -> Demonstration:
    """Return a demonstration of the second stage: well formed, most of them wrong (`IMPERFECT`)."""
    hops = scene.rng.choice((1, 2))
    mix = IMPERFECT[hops]
    behaviour = scene.rng.choices([kind for kind, _ in mix], [share for _, share in mix])[0]
    return behaviour(scene, scene.rng.choice(puzzles[hops]), _topk(scene))


def _topk(scene: Scene) -> int:
    # A policy trained with one number of passages fails with any other, so it varies around the ring's value of two.
    return scene.rng.choice((1, 2, 2, 2, 3))


def collate(shown: Sequence[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (int64) and weights (float32), both [n, longest], right-padded with id 0 and weight 0."""
    import torch

    longest = max(len(one.ids) for one in shown)
    ids = torch.zeros(len(shown), longest, dtype=torch.int64)
    weights = torch.zeros(len(shown), longest)
    for row, one in enumerate(shown):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        weights[row, : len(one.ids)] = torch.tensor(one.weights)
    return ids, weights
