"""Check at load that our scoring path agrees with transformers on a few random tokens.

A few architectures are covered by tests. For others, the check compares scores of two texts, each scored alone by
transformers with eager attention, with our forward pass in training mode (so that remaining dropout or noise shows), in
separate rows and packed into one row. No text may change the scores of the one beside it.

The same check decides whether a model can be computed span by span (`attention.py`) or needs a mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.model.architecture import FULL, layer_kinds, no_packing, refuse_packing
from learner.model.attention import use_spans
from learner.model.policy import PolicyModel
from protocol.errors import UserError

EXACT = ("llama", "qwen2", "qwen3")
"""Model types that need no check (tests/learner/test_model.py)."""
LENGTHS, PADDING = (11, 8), 3
TOLERANCE, COARSE = 1e-3, 0.25
"""Bound on a difference, in standard deviations of the log-probs. In float32 it applies to the largest difference.
bfloat16 rounds so much that single tokens may differ by as much as the log-probs themselves (another expert is chosen),
so there it applies to the median of each text. Mixing of texts is checked separately, and exactly."""


def settle_attention(policy: PolicyModel, directory: Path, *, packed: bool) -> None:
    """Make `policy` compute span by span if that is correct. Raises UserError if neither way agrees with transformers,
    or `packed` rows would mix.
    """
    config = policy.causal.config
    if layer_kinds(config) == {FULL} and config._attn_implementation == "sdpa":
        if use_spans(policy.causal) and (config.model_type in EXACT or _right_by_spans(policy, packed=packed)):
            return
        policy.causal.set_attn_implementation("sdpa")
    _refuse_differences(policy, directory, packed=packed)


def is_settled(config: Any) -> bool:
    """Return whether `settle_attention` does not compute anything for a model of this configuration."""
    full = layer_kinds(config) == {FULL} and config._attn_implementation == "sdpa"
    return full and config.model_type in EXACT


def _right_by_spans(policy: PolicyModel, *, packed: bool) -> bool:
    try:
        found = differences(policy, packed=packed)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # spans do not reach the layers, or a mask interferes
        return False
    return not _excess(policy, found)


def _refuse_differences(policy: PolicyModel, directory: Path, *, packed: bool) -> None:
    config = policy.causal.config
    kind = config.model_type
    if packed:
        refuse_packing(directory, config)
    try:
        found = differences(policy, packed=packed)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"{directory} contains a {kind} model, which the learner cannot run",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            todo="use a model of another type",
        ) from error
    excess = _excess(policy, found)
    if "eager" in excess:
        raise UserError(
            f"{directory} contains a {kind} model, which attention {config._attn_implementation} computes wrongly",
            why=f"log-probs differ from those of eager attention by {found['eager']:.2g} standard deviations",
            todo="set learner.model.attention to eager",
        )
    if "alone" in excess:
        raise UserError(
            f"{directory} contains a {kind} model, which would be scored wrongly",
            why=f"log-probs differ from those of transformers by {found['alone']:.2g} standard deviations",
            todo="use a model of another type",
        )
    if excess:
        why = f"a trajectory's log-probs change by {max(found['packed'], found['mixed']):.2g} standard deviations"
        raise no_packing(directory, kind, f"{why} beside another one")


def _excess(policy: PolicyModel, found: dict[str, float]) -> set[str]:
    """Return the differences that are too large or NaN."""
    limit = COARSE if policy.causal.dtype == torch.bfloat16 else TOLERANCE
    limits = {"eager": limit, "alone": limit / 5, "packed": limit, "mixed": limit / 10}
    return {name for name, difference in found.items() if not difference <= limits[name]}


@torch.no_grad()
def differences(policy: PolicyModel, *, packed: bool) -> dict[str, float]:
    """Return the differences of log-probs from those of transformers, in standard deviations of the latter: the largest
    in float32, the larger of both texts' medians in bfloat16.

    eager   of transformers with the attention of the settings, from transformers with eager attention
    alone   of our path, each text in its own row
    packed  of our path, both texts in one row
    mixed   of a text in a row, when the text beside it changes: the largest in any dtype
    """
    causal, was_training = policy.causal, policy.training
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, policy.vocabulary, (n + 1,), generator=generator) for n in LENGTHS]
    others = [torch.randint(0, policy.vocabulary, (n + 1,), generator=generator) for n in LENGTHS]
    implementation = causal.config._attn_implementation
    policy.eval()
    own = _by_transformers(policy, texts)
    if implementation == "eager":
        eager = own
    else:
        causal.set_attn_implementation("eager")
        eager = _by_transformers(policy, texts)
        causal.set_attn_implementation(implementation)
    policy.train()
    scale = float(eager.std()) or 1.0
    differ = _typical if causal.dtype == torch.bfloat16 else _largest
    found = {"eager": differ(own, eager) / scale, "alone": differ(_in_rows(policy, texts), own) / scale}
    if packed:
        together = _in_one_row(policy, texts)
        left = _in_one_row(policy, [texts[0], others[1]])[: LENGTHS[0]]
        right = _in_one_row(policy, [others[0], texts[1]])[LENGTHS[0] :]
        found["packed"] = differ(together, own) / scale
        found["mixed"] = _largest(torch.cat([left, right]), together) / scale
    policy.train(was_training)
    return found


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _typical(a: torch.Tensor, b: torch.Tensor) -> float:
    return max(float(part.median()) for part in torch.split((a - b).abs(), list(LENGTHS)))


def _by_transformers(policy: PolicyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    scores = []
    for text in texts:
        logits = policy.causal(input_ids=text[None, :-1], use_cache=False).logits[0].double()
        scores.append(torch.log_softmax(logits, -1).gather(-1, text[1:, None]).squeeze(-1))
    return torch.cat(scores)


def _in_rows(policy: PolicyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    width = max(LENGTHS) + PADDING
    ids = torch.stack([torch.nn.functional.pad(t[:-1], (0, width - len(t) + 1)) for t in texts])
    positions = torch.stack([torch.nn.functional.pad(torch.arange(n), (0, width - n)) for n in LENGTHS])
    index = torch.cat([row * width + torch.arange(n) for row, n in enumerate(LENGTHS)])
    return _scored(policy, ids, positions, None, index, texts)


def _in_one_row(policy: PolicyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    filling = torch.zeros(PADDING, dtype=torch.long)
    ids = torch.cat([*(t[:-1] for t in texts), filling])[None]
    positions = torch.cat([*(torch.arange(n) for n in LENGTHS), filling])[None]
    documents = torch.cat([*(torch.full((n,), number) for number, n in enumerate(LENGTHS)), filling - 1])[None]
    return _scored(policy, ids, positions, documents, torch.arange(sum(LENGTHS)), texts)


def _scored(
    policy: PolicyModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    documents: torch.Tensor | None,
    index: torch.Tensor,
    texts: list[torch.Tensor],
) -> torch.Tensor:
    targets = torch.cat([t[1:] for t in texts])
    return policy(ids, positions, documents, index, targets, 1.0, False).logprobs.double()  # type: ignore[no-any-return]
