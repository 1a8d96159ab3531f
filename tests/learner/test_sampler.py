"""seq -> question is a pure function of questions, seed and seq."""

from __future__ import annotations

import numpy as np
import pytest

from learner.data.questions import QuestionSet, fingerprint
from learner.data.sampler import BLOCK, Sampler
from tests.support.messages import make_question


def question_set(count: int) -> QuestionSet:
    questions = tuple(make_question(i) for i in range(count))
    return QuestionSet(questions, fingerprint(questions))


def ids(sampler: Sampler, seqs: range) -> list[str]:
    return [sampler.question(seq).id for seq in seqs]


def test_each_pass_has_every_question_once_in_its_own_order() -> None:
    sampler = Sampler(question_set(50), seed=3)
    passes = [ids(sampler, range(1 + 50 * n, 51 + 50 * n)) for n in range(4)]
    assert all(len(set(p)) == 50 for p in passes)
    assert len({tuple(p) for p in passes}) == 4


def test_the_question_of_a_seq_does_not_depend_on_earlier_calls() -> None:
    forward = ids(Sampler(question_set(20), 1), range(1, 101))
    backward = ids(Sampler(question_set(20), 1), range(100, 0, -1))
    assert forward == backward[::-1]


def test_the_order_is_the_same_on_every_machine() -> None:
    # Written down: a change means that runs which are under way would resume with other questions.
    got = ids(Sampler(question_set(10), 0), range(1, 13))
    assert got == ["q7", "q8", "q4", "q5", "q6", "q3", "q2", "q0", "q9", "q1", "q9", "q4"]


def test_seed_and_questions_change_the_order_and_the_fingerprint() -> None:
    a, b, c = Sampler(question_set(30), 0), Sampler(question_set(30), 1), Sampler(question_set(31), 0)
    assert len({a.fingerprint, b.fingerprint, c.fingerprint}) == 3
    assert ids(a, range(1, 31)) != ids(b, range(1, 31))


def test_seqs_begin_at_one() -> None:
    with pytest.raises(ValueError, match="below 1"):
        Sampler(question_set(3), 0).question(0)


def weighted(*shares: tuple[int, float]) -> Sampler:
    whole = question_set(sum(size for size, _ in shares))
    return Sampler(QuestionSet(whole.questions, whole.fingerprint, shares), seed=5)


def test_weights_give_each_source_its_share_in_every_block() -> None:
    sampler = weighted((10, 3.0), (50, 1.0))
    for block in range(3):
        got = [int(name[1:]) for name in ids(sampler, range(1 + block * BLOCK, 1 + (block + 1) * BLOCK))]
        assert sum(number < 10 for number in got) == BLOCK * 3 // 4


def test_each_source_passes_through_all_of_its_questions() -> None:
    sampler = weighted((700, 1.0), (700, 1.0))
    got = [int(name[1:]) for name in ids(sampler, range(1, 1 + 3 * BLOCK))]
    first = [number for number in got if number < 700]
    assert len(set(first[:700])) == 700 and len(set(first[700:1400])) == 700 and first[:700] != first[700:1400]
    assert got != sorted(got)


def test_a_tiny_weight_is_sampled_and_weights_change_the_fingerprint() -> None:
    assert any(name == "q5" for name in ids(weighted((5, 1e6), (1, 1.0)), range(1, BLOCK + 2)))
    names = {weighted((5, a), (5, 1.0)).fingerprint for a in (1.0, 2.0)} | {Sampler(question_set(10), 5).fingerprint}
    assert len(names) == 3


def test_the_mix_is_the_same_on_every_machine() -> None:
    # Written down, as above.
    got = ids(weighted((6, 2.0), (6, 1.0)), range(1, 13))
    assert got == ["q7", "q3", "q6", "q2", "q9", "q0", "q8", "q4", "q11", "q1", "q5", "q2"]


@pytest.mark.parametrize("sources", [1, 15, 16, 20, 100])
def test_each_pass_is_permuted_once_however_many_sources(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *given, **how: computed.append(1) or argsort(*given, **how))
    sampler, other = (weighted(*[(BLOCK, 1.0)] * sources) for _ in range(2))
    for seq in range(1, 2 * BLOCK):
        sampler.question(seq)
        if seq % 50 == 0:
            other.question(seq)  # of another run in the same process
    assert len(computed) <= 2 * (3 + sources * (2 if sources == 1 else 1)), "of two samplers: three blocks, each pass"
