"""One engine step on tensors: a forward pass over the decode tokens of running rows and the prompts of new rows, then
sampling.

Row i belongs to the i-th running request of the scheduler. Per-row values are stored in arrays, so that a step needs no
Python work per request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout_server.cpu_engine.model.llama import CausalLM, DecodePart, PromptPart
from rollout_server.cpu_engine.model.lora import Adapter, AdapterPart
from rollout_server.cpu_engine.model.sampler import SamplingBatch, mix, sample
from rollout_server.cpu_engine.scheduler.kv_cache import KVCache
from rollout_server.cpu_engine.scheduler.request import SamplingParams

SCORE_CHUNK = 256
"""Number of prompt positions whose logits are in memory at once when a prompt is scored."""


@dataclass
class Prompt:
    """New tokens of a row: compute ids[start:end]; ids[:start] are already in the cache.

    A step sets `start` to `end`. If that is less than the whole, the prompt continues in the next step.

    score_from  if a number s: `scores` receives the log-probs (T = 1) of ids[s + 1:], and `tops` the `top` best
                (log-prob, token) pairs at each of these positions
    """

    ids: list[int]
    start: int
    end: int
    params: SamplingParams
    seed: int
    score_from: int | None = None
    adapter: Adapter | None = None
    top: int = 0
    scores: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)


@dataclass(frozen=True)
class BannedTokens:
    """Tokens that row `row` must not sample in this step."""

    row: int
    ids: list[int]


@dataclass(frozen=True)
class Sampled:
    """Per row: token, log-prob (NaN if the logits were not finite), and the `top` best (log-prob, token) pairs."""

    tokens: list[int]
    logprobs: list[float]
    top: dict[int, list[tuple[float, int]]]


class ModelRunner:
    """Owns the model, the rows and the per-row values. `length`: number of tokens of a row in the KV cache."""

    def __init__(self, model: CausalLM, kv: KVCache, max_running: int) -> None:
        self.model, self.kv = model, kv
        self.length = np.zeros(max_running, np.int64)
        self._newest = np.zeros(max_running, np.int64)
        self._temperature = np.ones(max_running, np.float32)
        self._top_k = np.ones(max_running, np.int64)
        self._top_p = np.ones(max_running, np.float32)
        self._min_p = np.zeros(max_running, np.float32)
        self._seed = np.zeros(max_running, np.uint64)
        columns = (self.length, self._newest, self._temperature, self._top_k, self._top_p, self._min_p, self._seed)
        self._columns = columns
        self._adapters: list[Adapter | None] = [None] * max_running

    def move(self, source: int, target: int) -> None:
        """Move row `source` to row `target`."""
        self.kv.copy(source, target, int(self.length[source]))
        for column in self._columns:
            column[target] = column[source]
        self._adapters[target] = self._adapters[source]

    def step(
        self, active: int, prompts: Sequence[Prompt], bans: Sequence[BannedTokens], top: dict[int, int]
    ) -> Sampled:
        """Advance rows 0..active-1 by one token, and compute `prompts` in the rows after them.

        Only the last prompt may be a part, which gets no token. The caller must have reserved the memory in `kv`.

        top  row -> number of best tokens to report
        """
        for number, prompt in enumerate(prompts):
            self._start_row(active + number, prompt)
        hidden = self._forward(active, prompts)
        n = active + len(prompts) - bool(prompts and prompts[-1].end < len(prompts[-1].ids))
        logits = self.model.logits(hidden[:n])
        for ban in bans:
            logits[ban.row, ban.ids] = -torch.inf
        self.length[:active] += 1
        for number, prompt in enumerate(prompts):
            self.length[active + number] = prompt.start = prompt.end
        rules = SamplingBatch(
            temperature=self._temperature[:n],
            top_k=self._top_k[:n],
            top_p=self._top_p[:n],
            min_p=self._min_p[:n],
            seed=self._seed[:n],
            position=self.length[:n],
        )
        output = sample(logits, rules)
        self._newest[:n] = output.tokens.numpy()
        return Sampled(output.tokens.tolist(), output.logprobs.tolist(), _best(output.all_logprobs, top))

    def _start_row(self, row: int, prompt: Prompt) -> None:
        p = prompt.params
        self._temperature[row], self._top_k[row], self._top_p[row], self._min_p[row] = (
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
        )
        self._adapters[row] = prompt.adapter
        self._seed[row] = mix(np.array([prompt.seed], np.uint64))[0]

    def _forward(self, active: int, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the hidden states [active + prompts, E] of the next tokens."""
        parts = [(active + i, p.ids[p.start : p.end], p.start) for i, p in enumerate(prompts)]
        hidden = self._run(active, parts)
        if not parts:
            return hidden
        ends = active + np.cumsum([len(ids) for _, ids, _ in parts])
        for prompt, (_, ids, start), end in zip(prompts, parts, ends, strict=True):
            self._score(prompt, start, hidden[end - len(ids) : end])
        last = torch.from_numpy(np.concatenate((np.arange(active), ends - 1)))
        return hidden[last]

    def _run(self, active: int, parts: Sequence[tuple[int, list[int], int]]) -> torch.Tensor:
        """Run the forward pass over the decode tokens of rows 0..active-1 and `parts` (row, new ids, start)."""
        past = torch.from_numpy(self.length[:active])
        ids, positions, rows = [torch.from_numpy(self._newest[:active])], [past], [torch.arange(active)]
        prompts = _prompt_parts(parts, self.model.windows)
        if parts:
            lengths = torch.tensor([len(new) for _, new, _ in parts])
            starts = torch.tensor([start for _, _, start in parts])
            ids.append(torch.tensor([token for _, new, _ in parts for token in new]))
            first = (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
            positions.append(first + torch.arange(len(first)))
            rows.append(torch.tensor([row for row, _, _ in parts]).repeat_interleave(lengths))
        decode = _decode_part(past, self.model.windows) if active else None
        adapters = self._adapter_parts(active, parts)
        return self.model.forward(
            torch.cat(ids), torch.cat(positions), torch.cat(rows), self.kv, decode, prompts, adapters
        )

    def _adapter_parts(self, active: int, parts: Sequence[tuple[int, list[int], int]]) -> list[AdapterPart]:
        """Return which tokens of a forward pass use which adapter."""
        owners = self._adapters[:active] + [self._adapters[row] for row, _, _ in parts]
        used = {owner for owner in owners if owner is not None}
        if len(used) == 1 and None not in owners:
            return [AdapterPart(adapter, None) for adapter in used]
        sizes = [1] * active + [len(new) for _, new, _ in parts]
        found = []
        for adapter in used:
            tokens = np.flatnonzero(np.repeat([owner is adapter for owner in owners], sizes))
            found.append(AdapterPart(adapter, torch.from_numpy(tokens)))
        return found

    def _score(self, prompt: Prompt, start: int, hidden: torch.Tensor) -> None:
        """Append the requested log-probs of the tokens after positions start..start+len(hidden)-1."""
        if prompt.score_from is None:
            return
        first = max(start, prompt.score_from)
        last = min(start + len(hidden), len(prompt.ids) - 1)
        for at in range(first, last, SCORE_CHUNK):
            end = min(at + SCORE_CHUNK, last)
            logprobs = torch.log_softmax(self.model.logits(hidden[at - start : end - start]), -1)
            following = torch.tensor(prompt.ids[at + 1 : end + 1])[:, None]
            prompt.scores.extend(logprobs.gather(1, following)[:, 0].tolist())
            if prompt.top:
                best, tokens = logprobs.topk(prompt.top)
                pairs = zip(best.tolist(), tokens.tolist(), strict=True)
                prompt.tops.extend(list(zip(*pair, strict=True)) for pair in pairs)


def _decode_part(past: torch.Tensor, windows: Sequence[int]) -> DecodePart:
    width = int(past.max()) + 1
    masks = {window: _mask(past[:, None], width, window) for window in windows}
    return DecodePart(len(past), width, masks)


def _mask(queries: torch.Tensor, width: int, window: int) -> torch.Tensor:
    """Return [rows, 1, queries, width]: 0 where a query (position int64 [rows, queries]) sees a key, else -inf.

    With a window of w a query sees its own position and the w - 1 before it; with 0 it sees all.
    """
    keys, last = torch.arange(width), queries[..., None]
    unseen = keys > last
    if window:
        unseen |= keys <= last - window
    return torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None]


def _prompt_parts(parts: Sequence[tuple[int, list[int], int]], windows: Sequence[int]) -> list[PromptPart]:
    """Group `parts` (row, new ids, start) by length, up to a factor of four in one group.

    Lengths differ widely after new weights: whole prompts are computed together with single observations.
    """
    classes: dict[int, list[int]] = {}
    for number, (_, ids, _) in enumerate(parts):
        classes.setdefault(len(ids).bit_length() // 2, []).append(number)
    lengths = torch.tensor([len(ids) for _, ids, _ in parts])
    begins = lengths.cumsum(0) - lengths
    return [_prompt_part([parts[i] for i in chosen], begins[chosen], windows) for chosen in classes.values()]


def _prompt_part(
    parts: Sequence[tuple[int, list[int], int]], begins: torch.Tensor, windows: Sequence[int]
) -> PromptPart:
    """Build one part. `begins`: index of the first new token of each part among those of all prompts."""
    lengths = torch.tensor([len(ids) for _, ids, _ in parts])
    starts = torch.tensor([start for _, _, start in parts])
    longest, width = int(lengths.max()), int((starts + lengths).max())
    row = torch.repeat_interleave(lengths)
    offset = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    # padded queries see the same keys as a real one, so that softmax stays finite
    seen_to = (starts[:, None] + torch.arange(longest)).clamp_(max=width - 1)
    masks = {window: _mask(seen_to, width, window) for window in windows}
    rows = torch.tensor([row for row, _, _ in parts])
    return PromptPart(rows, longest, width, begins[row] + offset, row, offset, masks)


def _best(logprobs: torch.Tensor, top: dict[int, int]) -> dict[int, list[tuple[float, int]]]:
    found = {}
    for row, count in top.items():
        values, tokens = logprobs[row].topk(min(count, logprobs.shape[1]))
        pairs = zip(values.tolist(), tokens.tolist(), strict=True)
        found[row] = [pair for pair in pairs if pair[0] > -math.inf]  # banned tokens: -Infinity is not JSON
    return found
