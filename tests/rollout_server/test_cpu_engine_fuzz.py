"""Random schedules of the CPU engine against transformers: 5,000 requests in all with the slow ones.

Each seed is one engine of a random family with a random memory, and 250 requests (50 for seed 0): shared prefixes,
prompts in parts, retractions, aborts at every stage, scored prompts, and changes of weights. Every token has the
log-prob of the weights that its label names, every greedy token is the most likely one, and nothing is left at the end.
`-k seed-17` repeats one; `-s` prints its figures.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from rollout_server.cpu_engine.model.loader import Weights
from rollout_server.cpu_engine.scheduler import scheduler as scheduling
from rollout_server.cpu_engine.scheduler.request import Request, SamplingParams
from rollout_server.cpu_engine.scheduler.scheduler import Scheduler, one_of
from tests.rollout_server.test_cpu_engine_model import scheduler, write

FAMILIES = (
    *("qwen2 tied", "qwen3 own head size", "mistral with a window", "gemma3", "qwen3_moe", "llama 3 rotary"),
    *("olmoe", "mixtral with a window", "qwen2_moe", "qwen2_moe with windows, without biases", "granitemoe"),
)
REQUESTS, SEEDS = 250, 20
DRAWN = 500
"""Requests of each chi-square test."""
CLOSE = 1e-4


class Play:
    """One schedule. `figures`: what has happened."""

    def __init__(self, path: Path, draw: random.Random, count: int = REQUESTS) -> None:
        self.draw, self.count, self.figures = draw, count, Counter[str]()
        family = draw.choice(FAMILIES)
        self.models = {"1.0": write(path / "a", family), "1.1": write(path / "b", family)}
        for parameter in self.models["1.1"].parameters():
            parameter.data.mul_(1.25)
        self.models["1.1"].save_pretrained(path / "b")
        rows, budget = draw.choice([2, 5, 12]), draw.choice([256, 640, 2048, 8192])
        self.s: Scheduler = scheduler(path / "a", max_running=rows, max_total_tokens=budget, weight_version="1.0")
        self.s.wave = draw.choice([32, 100, 4096])
        self.weights: dict[str, Weights] = {"1.0": self.s.runner.model.weights}
        self.weights["1.1"] = Weights(self.weights["1.0"].config, torch.float32)
        self.weights["1.1"].load(path / "b")
        self.texts = [[draw.randrange(1, 97) for _ in range(600)] for _ in range(4)]
        self.requests: list[Request] = []

    def submit(self, number: int) -> None:
        draw = self.draw
        room = self.s.runner.kv.budget
        length = min(draw.choice([1, 7, 8, 9, 31, 32, 33, 64, 100, 190, 400]), room - 1)
        text = draw.choice(self.texts)
        ids = (text[: draw.randrange(length + 1)] + [draw.randrange(1, 97) for _ in range(length)])[:length]
        if self.requests and draw.random() < 0.3:  # the next turn of a conversation
            last = draw.choice(self.requests[-8:])
            ids = [*last.prompt_ids, *last.output_ids, 5, 6][: room - 1]
        greedy, tokens = draw.random() < 0.4, draw.choice([0, 1, 2, 15, 40])
        params = SamplingParams(
            max_new_tokens=tokens,
            min_new_tokens=draw.choice([0, min(2, tokens)]),
            ignore_eos=draw.random() < 0.5,
            top_k=1 if greedy else 1 << 30,
            temperature=1.0 if greedy else draw.choice([0.7, 1.0]),
            stop_token_ids=frozenset(draw.sample(range(97), 3)),
        )
        scored = draw.choice([-1, -1, 0, len(ids) // 2, len(ids)])
        limit = min(tokens, room - len(ids))
        r = Request(str(number), ids, params, number, limit, lambda *_: None, return_logprob=True, logprob_start=scored)
        self.requests.append(r)
        self.s.submit(r)

    def swap(self) -> None:
        """Change the weights, with the requests in flight retracted."""
        s = self.s
        s.retract_all()
        s.version = "1.1" if s.version == "1.0" else "1.0"
        s.runner.model.weights = self.weights[s.version]
        s.weights_changed()
        self.figures["weight changes"] += 1

    def run(self) -> None:
        draw, s = self.draw, self.s
        number = 0
        while number < self.count or s.waiting or s.running:
            if number < self.count and draw.random() < 0.5:
                for _ in range(min(draw.choice([1, 1, 8]), self.count - number)):
                    self.submit(number)
                    number += 1
            event = draw.random()
            live = s.running + list(s.waiting)
            if event < 0.03 and live:
                chosen = draw.sample(live, min(len(live), 2))
                s.abort(one_of(chosen))
            elif event < 0.04:
                s.retract_all()
            elif event < 0.05:
                self.swap()
            s.step()
            self.figures["parts"] += s._partial is not None
            assert s.runner.kv.tokens + s.cache.tokens <= s.runner.kv.budget
            assert [r.row for r in s.running] == list(range(len(s.running)))

    def check(self) -> float:
        """Compare every token. Return the largest deviation of a log-prob."""
        worst = 0.0
        for r in self.requests:
            ids, start = r.prompt_ids + r.output_ids, len(r.prompt_ids)
            self.figures.update(requests=1, tokens=len(r.output_ids), retractions=r.retractions)
            assert r.finish is not None and r.finish.get("status_code") is None
            self.figures["aborts"] += r.finish["type"] == "abort"
            for span in r.spans(len(r.output_ids)):
                logits = self.models[span["version"]](torch.tensor([ids])).logits[0]
                at = slice(start + span["start"] - 1, start + span["end"] - 1)
                spoken = torch.tensor(ids[at.start + 1 : at.stop + 1])[:, None]
                want = torch.log_softmax(logits[at] / r.params.temperature, -1).gather(1, spoken)[:, 0]
                got = torch.tensor(r.output_logprobs[span["start"] : span["end"]])
                free = [n for n in range(span["start"], span["end"]) if n >= r.params.min_new_tokens]  # no bans
                index = [n - span["start"] for n in free]
                worst = max([worst, *((got - want).abs() / want.abs().clamp(min=1))[index].tolist()])
                if r.params.top_k == 1:
                    best = logits[at].max(-1).values[index] - logits[at].gather(1, spoken)[index, 0]
                    assert (best < CLOSE).all(), "greedy tokens are the most likely ones"
            if r.input_logprobs is not None and r.finish["type"] != "abort":
                worst = max(worst, self._scores(r))
        return worst

    def _scores(self, r: Request) -> float:
        """The deviation of a scored prompt: of one version, which may have changed before the first token."""
        ids, deviations = torch.tensor([r.prompt_ids]), []
        for model in self.models.values():
            logprobs = torch.log_softmax(model(ids).logits[0], -1)[r.logprob_start : -1]
            want = logprobs.gather(1, ids[0, r.logprob_start + 1 :, None])[:, 0]
            got = torch.tensor(r.input_logprobs)
            assert got.shape == want.shape
            deviations.append(float(((got - want).abs() / want.abs().clamp(min=1)).max()) if len(want) else 0.0)
        self.figures["scored"] += 1
        return min(deviations)

    def drawn(self) -> float:
        """Return the chi-square statistic of first tokens over its limit at p = 1e-6, for 7 degrees of freedom."""
        prompt, params = self.texts[0][:20], SamplingParams(max_new_tokens=1, top_k=8, temperature=0.8, ignore_eos=True)
        requests = [Request(f"d{i}", prompt, params, 7919 * i, 1, lambda *_: None) for i in range(DRAWN)]
        for r in requests:
            self.s.submit(r)
        while self.s.waiting or self.s.running:
            self.s.step()
        logits = self.models[self.s.version](torch.tensor([prompt])).logits[0, -1]
        shares, tokens = torch.softmax(logits / 0.8, -1).topk(8)
        expected = shares / shares.sum() * DRAWN
        seen = Counter(r.output_ids[0] for r in requests)
        assert set(seen) <= set(tokens.tolist())
        pooled = [(seen[t], float(e)) for t, e in zip(tokens.tolist(), expected, strict=True) if e >= 5]
        rest = DRAWN - sum(n for n, _ in pooled), DRAWN - sum(e for _, e in pooled)
        self.figures["drawn"] += DRAWN
        return sum((n - e) ** 2 / e for n, e in [*pooled, rest] if e >= 5) / 40.5


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS + 1))],
    ids=lambda n: f"seed-{n}",
)
def test_no_schedule_changes_what_a_request_gets(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(scheduling, "CHUNK", draw.choice([16, 48, 1024]))
    play = Play(tmp_path, draw, REQUESTS if seed else 50)
    with torch.inference_mode():
        play.run()
        worst, chi = play.check(), play.drawn()
        s, figures = play.s, dict(play.figures)
        s.cache.clear()
    play.requests.clear()
    gc.collect()
    left = sum(isinstance(found, Request) for found in gc.get_objects())
    print(f"seed {seed}: {figures}, deviation {worst:.1e}, chi-square {chi:.2f} of its limit, {resident_mb():.0f} MB")
    assert worst < CLOSE and chi < 1
    assert (s.row_tokens, s.cache.tokens, len(s.cache), s.cache._holders, left) == (0, 0, 0, {}, 0)


@pytest.mark.slow
def test_5000_requests_leave_no_memory_behind(tmp_path: Path) -> None:
    play, used = Play(tmp_path, random.Random(1)), []
    with torch.inference_mode():
        for _ in range(SEEDS):
            play.run()
            del play.requests[:-8]
            used.append(resident_mb())
    growth = used[-1] - used[3]
    print(f"{SEEDS * REQUESTS} requests at one engine: {used[3]:.1f} MB after 1,000, {used[-1]:.1f} MB after all")
    assert growth < 10
