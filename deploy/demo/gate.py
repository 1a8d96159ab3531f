"""Whether the warm start has taught reading: how often a model quotes the right evidence in a world it has not seen.

Judged by relation, since what fails is a single relation whose values the model recites from memory instead of
copying, and reinforcement learning cannot mend that: the right value is never sampled. The answer's accuracy says
nothing here (it only copies the quote), so it is not looked at.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.demo.demonstrations import Scene, collate, ideal
from deploy.demo.lookup import Lookup
from deploy.demo.world import ONE_HOP, RELATION_NAMES, Puzzle, World

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

GATE_WORLD = 2_000_000
"""Seeds of the worlds that gates ask about start here; nobody trains on them."""
WORST_AT_LEAST = 0.90
MEAN_AT_LEAST = 0.96


@dataclass(frozen=True)
class GateReport:
    """Share of one-hop questions, by relation, whose evidence and whose query the model gets right word by word."""

    evidence: dict[str, float]
    query: dict[str, float]

    @property
    def worst(self) -> float:
        """Of all relations, evidence and query."""
        return min(*self.evidence.values(), *self.query.values())

    @property
    def mean(self) -> float:
        """Of the evidence."""
        return sum(self.evidence.values()) / len(self.evidence)

    @property
    def passed(self) -> bool:
        """Whether every relation is read and nearly every question read right."""
        return self.worst >= WORST_AT_LEAST and self.mean >= MEAN_AT_LEAST

    def line(self) -> str:
        """One line for a log."""
        table = " ".join(f"{relation} {share:.2f}" for relation, share in self.evidence.items())
        return f"evidence {table}; query {min(self.query.values()):.2f}"


def gate(model: Qwen2ForCausalLM, seed: int, asked: int = 32, topk: int = 2) -> GateReport:
    """Ask about a fresh world, teacher-forced and greedy: `asked` questions of each relation, `topk` passages."""
    import torch

    world = World(GATE_WORLD + seed)
    scene = Scene(world, Lookup(world), random.Random(seed))
    relations = [relation for relation in RELATION_NAMES for _ in range(asked)]
    shown = []
    for relation in relations:
        name = scene.rng.choice([n for n, r in scene.lookup.fact_keys if r == relation])
        puzzle = Puzzle(ONE_HOP.format(relation=relation, name=name), (world.fact(name, relation),))
        shown.append(ideal(scene, puzzle, topk))
    ids, _ = collate(shown)
    with torch.no_grad():
        said = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    right = (said[:, :-1] == ids[:, 1:]).tolist()

    def share(relation: str, spans: list[slice]) -> float:
        hits = [
            all(row[span.start - 1 : span.stop - 1])
            for row, span, asked_for in zip(right, spans, relations, strict=True)
            if asked_for == relation
        ]
        return sum(hits) / len(hits)

    evidence, queries = [one.evidence[0] for one in shown], [one.queries[0] for one in shown]
    return GateReport(
        {relation: share(relation, evidence) for relation in RELATION_NAMES},
        {relation: share(relation, queries) for relation in RELATION_NAMES},
    )
