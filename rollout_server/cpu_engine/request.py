"""One generation request: what was asked, what came out so far, why it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_server.cpu_engine.lora import Adapter

Finish = dict[str, Any]
"""SGLang's `finish_reason`."""

ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: Finish = {"type": "abort", "message": "Abort in waiting queue"}


def failed(message: str) -> Finish:
    """The finish reason of a request that the engine could not carry on; answered with HTTP 500."""
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's sampling_params, checked. `top_k` 1 is greedy (temperature 0 becomes that), 1 << 30 filters nothing.

    stream_interval  0: as the engine was told
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    stream_interval: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """Lists only grow, and only on the engine thread; the HTTP side reads prefixes whose length it was told.

    versions  [label, index of the first output token sampled under it], in order
    first     the first attempt at the same prompt, which scores it for all; None: this is it
    extra_key what may share keys and values; differs between adapters
    seed      64 bits; with a position it determines the draw
    limit     most output tokens: max_new_tokens, or less where context or cache could not hold them
    notify    called with the number of output tokens at the end and, with a `stream_interval` n > 0, after the first
              token and every n more
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    limit: int
    notify: Callable[[Request, int], None]
    end_ids: frozenset[int] = frozenset()
    stream_interval: int = 0
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    logprob_texts: bool = False
    extra_key: str = ""
    adapter: Adapter | None = None
    arrived: float = 0.0
    first: Request | None = None

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    finish: Finish | None = None
    first_token_at: float = 0.0
    ended_at: float = 0.0
    row: int = -1
    generation: int = -1
    order: int = 0
    block_keys: list[int] = field(default_factory=list)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of prompt tokens are still to be computed."""
        return self.return_logprob and self.logprob_start >= 0 and self.input_logprobs is None

    def due(self, length: int) -> bool:
        """Whether a stream gets a chunk after `length` tokens: after 1, n + 1, 2n + 1, ..., as in SGLang."""
        n = self.stream_interval
        return n == 1 or (n > 1 and length % n == 1)

    def spans(self, length: int) -> list[dict[str, Any]]:
        """SGLang's `weight_versions` of the first `length` output tokens: half-open [start, end)."""
        ends = [start for _, start in self.versions[1:]] + [length]
        return [
            {"version": label, "start": start, "end": min(end, length)}
            for (label, start), end in zip(self.versions, ends, strict=False)
            if start < length
        ]
