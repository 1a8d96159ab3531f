"""Sampling: the distribution, the filters, the reported log-probs, and the end of a generation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from rollout_server.cpu_engine.model.sampler import SamplingBatch, invert, sample, uniform
from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.request import Request, SamplingParams, StopCriteria, StopStrings, visible_text


def rules(count: int, **changed: Any) -> SamplingBatch:
    columns: dict[str, Any] = {
        "temperature": np.ones(count, np.float32),
        "top_k": np.full(count, 1 << 30),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "seed": np.arange(count, dtype=np.uint64),
        "position": np.zeros(count, np.int64),
    }
    for name, value in changed.items():
        columns[name] = np.full(count, value, columns[name].dtype)
    return SamplingBatch(**columns)


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])


def shares(**changed: Any) -> torch.Tensor:
    count = 40_000
    drawn = sample(LOGITS.repeat(count, 1), rules(count, **changed))
    return torch.bincount(drawn.tokens, minlength=5) / count


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_softmax_says(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(shares(temperature=temperature), expected, atol=0.01, rtol=0)


def test_top_k_top_p_and_min_p_leave_the_likeliest_in_proportion() -> None:
    p = torch.softmax(LOGITS, -1)
    two = torch.cat((p[:2] / p[:2].sum(), torch.zeros(3)))
    three = torch.cat((p[:3] / p[:3].sum(), torch.zeros(2)))
    torch.testing.assert_close(shares(top_k=2), two, atol=0.01, rtol=0)
    torch.testing.assert_close(shares(top_p=float(p[:2].sum()) - 0.01), two, atol=0.01, rtol=0)
    torch.testing.assert_close(shares(min_p=float(p[2] / p[0]) - 0.01), three, atol=0.01, rtol=0)


@pytest.mark.parametrize("vocab", [3000, 5000])
def test_filters_leave_the_same_token_whether_a_short_or_a_whole_order_is_enough(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 8
    sorts: list[int] = []
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab, generator=generator) * torch.linspace(0.1, 6, count)[:, None]
    for changed in ({"top_p": 0.95}, {"top_k": 50}, {"top_k": 1500}, {"min_p": 0.01}, {"top_p": 0.99, "top_k": 1200}):
        wanted = rules(count, **changed)
        at = torch.from_numpy(uniform(wanted.seed, wanted.position)).tolist()
        expected = [
            drawn_slowly(p, u, wanted, row) for row, (p, u) in enumerate(zip(logits.softmax(-1), at, strict=True))
        ]
        assert sample(logits.clone(), wanted).tokens.tolist() == expected
    whole = torch.Tensor.sort

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        sorts.append(len(tensor))
        return whole(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    sample(logits.clone(), rules(count, top_k=50))
    assert not sorts  # 50 of the first 1024: nothing sorts the vocabulary
    sample(logits.clone(), rules(count, top_p=0.95))
    assert len(sorts) == 1 and 0 < sorts[0] < count  # only the flat rows need it


def drawn_slowly(probs: torch.Tensor, at: float, wanted: SamplingBatch, row: int) -> int:
    """The token at `at` of what top-k, top-p and min-p leave of one row, in float64 and plain Python."""
    values = probs.double().tolist()
    left, mass = [], 0.0
    for place, token in enumerate(sorted(range(len(values)), key=lambda token: -values[token])):
        best = values[left[0]] if left else values[token]
        if place >= wanted.top_k[row] or mass > wanted.top_p[row] or values[token] < wanted.min_p[row] * best:
            break
        left.append(token)
        mass += values[token]
    target, mass = at * sum(values[token] for token in left), 0.0
    for token in left:
        mass += values[token]
        if mass > target:
            return token
    raise AssertionError("the point lies beyond the total")


def test_rows_with_different_rules_do_not_mix() -> None:
    count = 4
    r = rules(count)
    r.top_k[1], r.temperature[2], r.top_p[3] = 1, 0.01, 1e-6
    drawn = sample(LOGITS.repeat(count, 1), r)
    assert drawn.tokens[1:].tolist() == [0, 0, 0]
    expected = torch.log_softmax(LOGITS, -1)
    # filters do not renormalise what is reported; the temperature does
    torch.testing.assert_close(drawn.logprobs[[1, 3]], expected[[0, 0]])
    torch.testing.assert_close(drawn.logprobs[0], expected[drawn.tokens[0]])
    assert drawn.logprobs[2] > -1e-6


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=2, max_size=40).filter(any),
    st.sampled_from([0.0, 1e-9, 0.5, 1 - 2**-24]),
)
@settings(deadline=None)
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], at: float) -> None:
    index = int(invert(torch.tensor([weights]), torch.tensor([at]))[0])
    assert weights[index] > 0


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    """The first outputs for seed 1234567, as published with the reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = uniform(np.full(4, 1234567, np.uint64), np.arange(4))
    assert (found * 2**24).astype(int).tolist() == [number >> 40 for number in published]


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    a, b = uniform(seeds, np.zeros(20_000, np.int64)), uniform(seeds, np.ones(20_000, np.int64))
    assert a.min() >= 0 and a.max() < 1
    assert abs(float(a.mean()) - 0.5) < 0.01 and abs(float(np.corrcoef(a, b)[0, 1])) < 0.03
    histogram = np.histogram(a, 10, (0, 1))[0]
    assert histogram.min() > 1800


def tokenizer(path: Path, kind: str) -> Tokenizer:
    texts = ["<search> who founded müller </search>", "the answer is 東京 </answer> done"] * 4
    if kind == "bytes":
        rust = RustTokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        rust.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    elif kind == "metaspace":
        rust = RustTokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.Metaspace()
        rust.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=80, show_progress=False)
    else:
        rust = RustTokenizer(models.WordLevel(unk_token="?"))
        rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=["?", "</search>"], show_progress=False)
    rust.train_from_iterator(texts, trainer)
    path.mkdir(exist_ok=True)
    rust.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


TEXT = "<search> who founded müller </search> the answer is 東京 </answer> done"


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "words"])
@pytest.mark.parametrize("stop", ["</search>", "</search> the", "müller", "東京", "京", "er is", " ", "d", "done"])
def test_a_stop_string_is_found_at_the_first_token_that_completes_it(tmp_path: Path, kind: str, stop: str) -> None:
    tokens = tokenizer(tmp_path, kind)
    ids = tokens.encode(TEXT)
    found = StopStrings((stop,), tokens)
    hits = [n for n in range(1, len(ids) + 1) if found.hit(ids[:n]) is not None]
    naive = [n for n in range(1, len(ids) + 1) if stop in tokens.decode(ids[:n], False)]
    assert hits[:1] == naive[:1]
    assert hits or kind == "words" or stop not in TEXT


def test_no_stop_string_is_seen_where_there_is_none(tmp_path: Path) -> None:
    tokens = tokenizer(tmp_path, "bytes")
    found = StopStrings(("</search>x", "zz"), tokens)
    ids = tokens.encode(TEXT)
    assert not any(found.hit(ids[:n]) for n in range(1, len(ids) + 1))


def ended(path: Path, **params: Any) -> tuple[Request, Tokenizer]:
    tokens = tokenizer(path, "bytes")
    stopping = StopCriteria(tokens)
    r = Request("r", [1], SamplingParams(**params), 0, params.get("max_new_tokens", 128), lambda *_: None)
    r.end_ids = stopping.end_ids(r)
    for token in tokens.encode(TEXT):
        r.output_ids.append(token)
        r.finish = stopping.check(r)
        if r.finish:
            break
    return r, tokens


def test_length_comes_before_every_other_reason(tmp_path: Path) -> None:
    whole, _ = ended(tmp_path, stop=("</search>",))
    assert whole.finish == {"type": "stop", "matched": "</search>"}
    same, _ = ended(tmp_path, stop=("</search>",), max_new_tokens=len(whole.output_ids))
    assert same.finish == {"type": "length", "length": len(whole.output_ids)}


def test_ignore_eos_silences_stop_token_ids_but_not_stop_strings(tmp_path: Path) -> None:
    space = tokenizer(tmp_path, "bytes").encode(TEXT)[3]
    with_ids, _ = ended(tmp_path, stop_token_ids=frozenset({space}))
    assert with_ids.finish == {"type": "stop", "matched": space}
    ignored, _ = ended(tmp_path, stop_token_ids=frozenset({space}), ignore_eos=True, stop=("müller",))
    assert ignored.finish == {"type": "stop", "matched": "müller"}


def test_text_is_cut_before_the_stop_string_and_half_a_character_is_held_back(tmp_path: Path) -> None:
    r, tokens = ended(tmp_path, stop=("</search>",))
    assert visible_text(r, len(r.output_ids), tokens) == "<search> who founded müller "
    at_once, _ = ended(tmp_path, stop=("<",))
    assert visible_text(at_once, len(at_once.output_ids), tokens) == ""
    r.finish = None
    seen = [visible_text(r, n, tokens) for n in range(len(r.output_ids) + 1)]
    assert all(later.startswith(earlier) and "\ufffd" not in later for earlier, later in itertools.pairwise(seen))
