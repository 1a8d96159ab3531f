"""The question of seq n: a pure function of (fingerprint of the questions, seed, n).

So any lost task can be rebuilt, and a resumed learner needs no sampler state.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from learner.data.questions import QuestionSet
from protocol.messages import Question


class Sampler:
    """Endless passes over the questions; each pass is another permutation.

    Seq 1..N is the first pass, N+1..2N the second, and so on.
    """

    def __init__(self, questions: QuestionSet, seed: int) -> None:
        self.questions = questions
        self.seed = seed

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint that changes if any seq would get another question."""
        return hashlib.sha256(f"{self.questions.fingerprint}:{self.seed}".encode()).hexdigest()

    def question(self, seq: int) -> Question:
        """Return the question of occurrence `seq`, from 1. Raises ValueError for a seq below 1."""
        if seq < 1:
            raise ValueError(f"seq {seq} is below 1")
        which, place = divmod(seq - 1, len(self.questions))
        order = _permutation(self.fingerprint, which, len(self.questions))
        return self.questions.questions[int(order[place])]


@lru_cache(maxsize=4)
def _permutation(fingerprint: str, which: int, count: int) -> npt.NDArray[np.intp]:
    # Philox by key: the same numbers on every platform and for every numpy that keeps its stream promise.
    words = hashlib.sha256(f"{fingerprint}:{which}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(words[:16], "little")))
    # argsort of raw 64-bit words: Generator.permutation's algorithm may change between numpy versions, this does not.
    return np.argsort(generator.bit_generator.random_raw(count), kind="stable")
