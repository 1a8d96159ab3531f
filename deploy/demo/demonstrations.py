"""What the demo's model is shown before reinforcement learning: drills, ideal and imperfect trajectories, as token ids.

A good trajectory looks a fact up, quotes the evidence (`<think> mayor kona vesta </think>`) and answers from the quote:
the quote turns answering into plain copying. An imperfect one is well formed and wrong in one of the ways that
reinforcement learning must cure: it guesses, asks for the wrong thing, reads the wrong fact or stops one hop early.
Even then whatever it quotes is really there, so that imperfection never unlearns copying.

Texts round a trajectory come from `rollout_server.prompts.demo`, so that the ids equal those of the running system.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.demo.lookup import Lookup
from deploy.demo.vocabulary import GUESS_THOUGHT, THOUGHT, encode
from deploy.demo.world import ONE_HOP, RELATIONS, Fact, Puzzle, World
from rollout_server.prompts import demo

POLICY_WEIGHT = 1.0
ENVIRONMENT_WEIGHT = 0.1
"""Loss weight of observations: names that recur inside them are further practice in copying."""


@dataclass
class Demonstration:
    """Token ids with the weight that each token's prediction has in the loss (prompt tokens: 0)."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def _add(self, text: str, weight: float) -> None:
        ids = encode(text)
        self.ids += ids
        self.weights += [weight] * len(ids)

    def prompt(self, question: str) -> None:
        """The question, in the template's words."""
        self._add(demo.PROMPT.format(question=question), 0.0)

    def policy(self, text: str) -> None:
        """What the policy says."""
        self._add(text, POLICY_WEIGHT)

    def observation(self, world: World, names: Sequence[str], flipped: Sequence[bool] = ()) -> None:
        """The passages about `names`, as the environment shows them."""
        turned = flipped or [False] * len(names)
        passages = [
            demo.PASSAGE.format(title=name, text=world.text(name, flip)) for name, flip in zip(names, turned, strict=True)
        ]
        text = demo.PASSAGE_SEPARATOR.join(passages) or demo.EMPTY_RESULT
        self._add(demo.OBSERVATION.format(passages=text), ENVIRONMENT_WEIGHT)


@dataclass(frozen=True)
class Scene:
    """A world, its index, and the generator that everything random about a demonstration is drawn from."""

    world: World
    lookup: Lookup
    rng: random.Random

    def any_fact(self) -> Fact:
        """A fact of this world."""
        name, relation = self.rng.choice(self.lookup.fact_keys)
        return self.world.fact(name, relation)


def query(relation: str, name: str) -> str:
    """What is put between the search tags to find a fact."""
    return f"{relation} of {name}"


def _search(shown: Demonstration, scene: Scene, relation: str, name: str, topk: int, first: bool) -> None:
    thought = f"<think> {THOUGHT} </think> " if first else ""
    shown.policy(f"{thought}<search> {query(relation, name)} </search>")
    shown.observation(scene.world, scene.lookup.top(query(relation, name), topk))


def _answer(shown: Demonstration, value: str) -> None:
    shown.policy(f"<answer> {value} </answer>")


def _quote(shown: Demonstration, relation: str, value: str) -> None:
    shown.policy(f"<think> {relation} {value} </think>")


def ideal(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Looks up every fact of the chain, quotes each, answers with the last."""
    shown = Demonstration()
    shown.prompt(puzzle.question)
    for number, fact in enumerate(puzzle.chain):
        _search(shown, scene, fact.relation, fact.subject, topk, first=number == 0)
        _quote(shown, fact.relation, fact.value)
    _answer(shown, puzzle.answer)
    return shown


def guess(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Answers at once with some name of this world."""
    shown = Demonstration()
    shown.prompt(puzzle.question)
    shown.policy(f"<think> {GUESS_THOUGHT} </think>")
    _answer(shown, scene.rng.choice(scene.lookup.names))
    return shown


def wrong_query(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Asks for another subject's fact, then quotes and answers faithfully what it found there."""
    shown = Demonstration()
    shown.prompt(puzzle.question)
    other = scene.any_fact()
    _search(shown, scene, other.relation, other.subject, topk, first=True)
    _quote(shown, other.relation, other.value)
    _answer(shown, other.value)
    return shown


def wrong_fact(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Finds the right passage, but quotes and answers its other fact."""
    shown = Demonstration()
    shown.prompt(puzzle.question)
    fact = puzzle.chain[0]
    _search(shown, scene, fact.relation, fact.subject, topk, first=True)
    pairs = RELATIONS[scene.world.kind_of[fact.subject]]
    other = next(relation for relation, _ in pairs if relation != fact.relation)
    value = scene.world.facts[fact.subject, other]
    _quote(shown, other, value)
    _answer(shown, value)
    return shown


def early_stop(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    """Does the first hop well and answers with what it found there."""
    return _first_hop(scene, puzzle, topk)


def _first_hop(scene: Scene, puzzle: Puzzle, topk: int) -> Demonstration:
    shown = Demonstration()
    shown.prompt(puzzle.question)
    fact = puzzle.chain[0]
    _search(shown, scene, fact.relation, fact.subject, topk, first=True)
    _quote(shown, fact.relation, fact.value)
    _answer(shown, fact.value)
    return shown


IMPERFECT = {
    1: ((ideal, 0.25), (guess, 0.45), (wrong_query, 0.20), (wrong_fact, 0.10)),
    2: ((ideal, 0.15), (guess, 0.45), (wrong_query, 0.15), (early_stop, 0.25)),
}
"""Number of hops -> behaviours and their shares in the mix that the warm start ends on."""


def reading_drill(scene: Scene, asked: int = 5) -> Demonstration:
    """Two or three passages, then questions about them with query, quote and answer: copying, densely packed."""
    rng, world = scene.rng, scene.world
    shown = Demonstration()
    names = rng.sample(scene.lookup.names, rng.choice((2, 2, 3)))
    if rng.random() < 0.5:
        names = scene.lookup.top(query(*rng.choice(scene.lookup.fact_keys)[::-1]), 2)
        rng.shuffle(names)
    shown.observation(world, names, [rng.random() < 0.5 for _ in names])
    for _ in range(asked):
        name = rng.choice(names)
        relation = rng.choice(RELATIONS[world.kind_of[name]])[0]
        value = world.facts[name, relation]
        shown.prompt(ONE_HOP.format(relation=relation, name=name))
        shown.policy(f"<search> {query(relation, name)} </search> <think> {relation} {value} </think>")
        _answer(shown, value)
    return shown


def practice(scene: Scene, puzzles: dict[int, list[Puzzle]]) -> Demonstration:
    """First stage: 60 % drills, 40 % ideal trajectories of one or two hops."""
    if scene.rng.random() < 0.6:
        return reading_drill(scene)
    return ideal(scene, scene.rng.choice(puzzles[scene.rng.choice((1, 2))]), _topk(scene))


def imperfect(scene: Scene, puzzles: dict[int, list[Puzzle]]) -> Demonstration:
    """Second stage: well-formed trajectories, most of them wrong (`IMPERFECT`)."""
    hops = scene.rng.choice((1, 2))
    kinds, shares = zip(*IMPERFECT[hops], strict=True)
    behaviour = scene.rng.choices(kinds, shares)[0]
    return behaviour(scene, scene.rng.choice(puzzles[hops]), _topk(scene))


def _topk(scene: Scene) -> int:
    # A policy trained on one number of passages fails on any other, so the number varies round the ring's two.
    return scene.rng.choice((1, 2, 2, 2, 3))
