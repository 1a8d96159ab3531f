"""The question of seq n: a pure function of (fingerprint of the questions, seed, n).

So any lost task can be rebuilt, and a resumed learner needs no sampler state. A question costs O(BLOCK) with weights
and O(1) without; a permutation of N questions, O(N log N), is computed once for each pass of a source, in order of seq.
"""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from learner.data.questions import QuestionSet
from protocol.messages import Question

BLOCK = 1024
"""Questions in which every source has exactly its share, rounded to a whole number and at least 1."""
SPARE = 16
"""Permutations that are kept beyond one for each source: the mix of a block, and passes of reissued seqs."""


class Sampler:
    """Endless passes over the questions; each pass is another permutation.

    Without weights, seq 1..N is the first pass over all questions, N+1..2N the second, and so on. With weights, every
    block of seqs has the same number of questions of each source, in random order; each source has its own passes.
    """

    def __init__(self, questions: QuestionSet, seed: int) -> None:
        self.questions = questions
        self.seed = seed
        self._quotas = quotas([weight for _, weight in questions.shares], BLOCK)
        # of this instance: another one's permutations would displace its own
        self._permutation = lru_cache(maxsize=len(questions.shares) + SPARE)(_permutation)
        self._starts = [0, *accumulate(count for count, _ in questions.shares)]

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint that changes if any seq would get another question."""
        pairs = zip(self.questions.shares, self._quotas, strict=True)
        shares = "".join(f":{count}x{quota}" for (count, _), quota in pairs)
        return hashlib.sha256(f"{self.questions.fingerprint}:{self.seed}{shares}".encode()).hexdigest()

    def question(self, seq: int) -> Question:
        """Return the question of occurrence `seq`, from 1. Raises ValueError for a seq below 1."""
        if seq < 1:
            raise ValueError(f"seq {seq} is below 1")
        if not self._quotas:
            return self.questions.questions[self._drawn(self.fingerprint, seq - 1, len(self.questions))]
        block, place = divmod(seq - 1, sum(self._quotas))
        order = self._permutation(f"{self.fingerprint}:mix", block, sum(self._quotas))
        ends = np.cumsum(self._quotas)
        of_each = np.searchsorted(ends, order, side="right")
        source = int(of_each[place])
        earlier = block * self._quotas[source] + int((of_each[:place] == source).sum())
        count, _ = self.questions.shares[source]
        return self.questions.questions[
            self._starts[source] + self._drawn(f"{self.fingerprint}:{source}", earlier, count)
        ]

    def _drawn(self, name: str, nth: int, count: int) -> int:
        """Return the `nth` draw, from 0, of endless passes over `count` things."""
        which, place = divmod(nth, count)
        return int(self._permutation(name, which, count)[place])


def quotas(weights: list[float], block: int) -> list[int]:
    """Return whole numbers in proportion to `weights`, each at least 1, that sum to about `block`."""
    total = sum(weights)
    return [max(1, round(block * weight / total)) for weight in weights]


def _permutation(fingerprint: str, which: int, count: int) -> npt.NDArray[np.intp]:
    # Philox by key: the same numbers on every platform and for every numpy that keeps its stream promise.
    words = hashlib.sha256(f"{fingerprint}:{which}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(words[:16], "little")))
    # argsort of raw 64-bit words: Generator.permutation's algorithm may change between numpy versions, this does not.
    return np.argsort(generator.bit_generator.random_raw(count), kind="stable")
