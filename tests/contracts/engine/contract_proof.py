"""What an answer claims, and what transformers computes to prove it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from contract_engines import Server, picked


def reported(answer: Any) -> torch.Tensor:
    """The log-probs of the output, as the answer brings them."""
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def close(got: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    """Equal as float32 in two implementations can be."""
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def expect_apart(got: torch.Tensor, other: torch.Tensor) -> None:
    """The other weights would not have said the same: a border is proven, not just labelled."""
    assert (got - other).abs().median() > 0.1


def spans(answer: Any) -> list[tuple[str, int, int]]:
    """`weight_versions` as (version, start, end), which must cover the output without a gap."""
    found = [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]
    assert found[0][1] == 0 and found[-1][2] == len(answer["output_ids"])
    assert all(earlier[2] == later[1] for earlier, later in itertools.pairwise(found))
    return found


def border(answer: Any) -> int:
    """The index at which version 2.0 begins, after 1.0."""
    (old, _, end), (new, start, _) = spans(answer)
    assert (old, new) == ("1.0", "2.0") and 0 < start == end < len(answer["output_ids"])
    return start


def over_old_cache(server: Server, ids: list[int], stored: int) -> torch.Tensor:
    """Log-probs of ids[stored + 1:] by the second weights, over keys and values of ids[:stored] by the first."""
    with torch.inference_mode():
        cache = server.policy(server.first)(torch.tensor([ids[:stored]]), use_cache=True).past_key_values
        rest = torch.tensor([ids[stored:]])
        logits = server.policy(server.second)(rest, past_key_values=copy.deepcopy(cache)).logits[0]
    return picked(logits[:-1], ids[stored + 1 :])
