"""The policy as a module that scores trained tokens: a transformers model with block-diagonal attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from learner.config.model import CriticSettings, ModelSettings
from learner.model.architecture import length_limit, refuse_context
from learner.model.attention import Spans, attention_mask, takes_spans
from learner.model.logprobs import Scores, ScoringLinear, Wanted, can_score, score_fused, score_hidden, wide
from learner.model.stored_weights import StoredWeights

PREFIX = "causal."
"""Prefix that PolicyModel adds to the names of transformers."""

BACKBONE_GRADIENT = 0.1
"""Share of the value loss's gradient that reaches the policy: more of it drowns that of the policy's loss."""
HEAD_LR_SCALE = 10.0
"""The value head's learning rate, relative to the policy's: the head is new, the policy is not."""


class ValueHead(torch.nn.Linear):
    """Hidden states [N, H] to values [N] float32; initially 0, so that the first targets are the plain rewards."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(width, 1, dtype=dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [N] float32 for any dtype of the weights: bfloat16 would round values to two digits."""
        return F.linear(wide(input), wide(self.weight), wide(self.bias)).squeeze(-1)


class PolicyModel(torch.nn.Module):
    """A causal language model of transformers; `forward` returns the scores of the trained tokens only.

    critic  set if the policy has a value head, which fills `Scores.values`: of the state before each trained token
    """

    def __init__(self, causal: Any, settings: ModelSettings, critic: CriticSettings | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.value_head: ValueHead | None = None
        self.lr_scales: dict[str, float] = {}  # read by learner.engine.optimizer
        self.vocabulary: int = causal.config.vocab_size
        self.top_among = self.vocabulary
        """Number of ids from which the likeliest tokens are chosen; for a reference, that of the policy."""
        self.chunk_bytes = settings.logit_chunk_bytes
        self.stored: StoredWeights | None = getattr(causal, "stored", None)
        """Set while the weights of `causal` are still in their files."""
        head = causal.get_output_embeddings()
        if critic is not None:
            self.value_head = ValueHead(head.weight.shape[1], causal.dtype)
            self.lr_scales["value_head."] = HEAD_LR_SCALE
        if can_score(head):
            head.__class__ = ScoringLinear
            head.fp32 = settings.fp32_lm_head

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor | None,
        index: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        top: int = 0,
        at_ids: torch.Tensor | None = None,
    ) -> Scores:
        """Return the scores of the N trained tokens.

        ids, positions [R, L] int64; document_ids [R, L] int64, or None if no row contains more than one trajectory;
        index [N] int64 into the flattened rows, targets [N] int64, at_ids [N, k] int64.
        """
        hidden = hidden_states(backbone(self.causal), ids, positions, document_ids)[index]
        top = min(top, self.top_among)
        layer = OutputLayer.of(self.causal)
        if isinstance(layer.head, ScoringLinear) and layer.cap is None:
            scale = layer.factor / temperature
            wanted = Wanted(targets, at_ids, scale, entropy_gradient, top, self.chunk_bytes, self.top_among)
            scores = score_fused(layer.head, hidden, wanted)
        else:
            scores = score_hidden(
                hidden,
                targets,
                layer.__call__,
                temperature=temperature,
                vocabulary=self.vocabulary,
                chunk_bytes=self.chunk_bytes,
                entropy_gradient=entropy_gradient,
                top=top,
                at_ids=at_ids,
                among=self.top_among,
            )
        if self.value_head is None:
            return scores
        apart = hidden.detach()
        return scores._replace(values=self.value_head(apart + BACKBONE_GRADIENT * (hidden - apart)))


def backbone(causal: Any) -> Any:
    """Return the model below the output layer; transformers' `base_model` names no attribute of Llama 4."""
    return causal.model if causal.base_model is causal else causal.base_model


def hidden_states(
    base: Any, ids: torch.Tensor, positions: torch.Tensor, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return [R * L, H]: the last hidden states of a base model of transformers, rows one after the other.

    Raises UserError for sequences longer than `length_limit`.
    """
    if length_limit(base.config):
        refuse_context(base.config.name_or_path, base.config, int(positions.max()) + 1)
    who: dict[str, Any] = {"attention_mask": None}
    if document_ids is not None and takes_spans(base.config):
        who["spans"] = Spans.of(document_ids, positions)
    elif document_ids is not None:
        who["attention_mask"] = attention_mask(document_ids, positions, base.config, base.dtype)
    output = base(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, **who)
    hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden


class OutputLayer(NamedTuple):
    """Maps hidden states to logits: the linear layer, and extra operations of some models.

    factor  multiplies the logits (Cohere, Granite)
    cap     bounds them softly (Gemma 2), None if unused
    """

    head: Any
    factor: float
    cap: float | None

    @classmethod
    def of(cls, causal: Any) -> OutputLayer:
        """Return the output layer of the configuration; the parity check finds options that it does not recognise."""
        config = causal.config
        factor = getattr(config, "logit_scale", None) or 1.0
        if config.model_type.startswith("granite"):
            factor /= getattr(config, "logits_scaling", None) or 1.0
        return cls(causal.get_output_embeddings(), factor, getattr(config, "final_logit_softcapping", None))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V]."""
        logits: torch.Tensor = self.head(hidden)
        if self.factor != 1.0:
            logits = wide(logits) * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(wide(logits) / self.cap)
