"""The policy as a module that scores trained tokens: transformers inside, block-diagonal attention around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from learner.config.model import CriticSettings, ModelSettings
from learner.model.attention import Spans, attention_mask, takes_spans
from learner.model.logprobs import Scores, ScoringLinear, Wanted, can_score, score_fused, score_hidden, wide

PREFIX = "causal."
"""What PolicyModel adds to the names of transformers."""


class ValueHead(torch.nn.Linear):
    """Hidden states [N, H] to values [N] float32; all 0 at first, so that the first targets are the bare rewards."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(width, 1, dtype=dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[N] float32 whatever the weights' dtype: bfloat16 would round values to two digits."""
        return F.linear(wide(input), wide(self.weight), wide(self.bias)).squeeze(-1)


class PolicyModel(torch.nn.Module):
    """A causal language model of transformers; `forward` gives the scores of the trained tokens only.

    critic  where the policy carries a value head, which makes `Scores.values`: of the state before each trained token
    """

    def __init__(self, causal: Any, settings: ModelSettings, critic: CriticSettings | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.value_head: ValueHead | None = None
        self.backbone_gradient = 0.0
        self.lr_scales: dict[str, float] = {}  # read by learner.engine.optimizer
        self.vocabulary: int = causal.config.vocab_size
        self.top_among = self.vocabulary
        """The likeliest tokens are chosen among the first so many ids: of a reference, the policy's."""
        self.chunk_bytes = settings.logit_chunk_bytes
        head = causal.get_output_embeddings()
        if critic is not None:
            self.value_head = ValueHead(head.weight.shape[1], causal.dtype)
            self.backbone_gradient = critic.backbone_gradient
            self.lr_scales["value_head."] = critic.head_lr_scale
        if can_score(head):
            head.__class__ = ScoringLinear
            head.fp32 = settings.fp32_lm_head

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor | None,
        index: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        top: int = 0,
        at_ids: torch.Tensor | None = None,
    ) -> Scores:
        """Scores of the N trained tokens.

        ids, positions [R, L] int64; documents [R, L] int64 or None when no row holds more than one trajectory;
        index [N] int64 into the flattened rows, targets [N] int64, at_ids [N, k] int64.
        """
        hidden = hidden_states(self.causal.base_model, ids, positions, documents)[index]
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
        return scores._replace(values=self.value_head(apart + self.backbone_gradient * (hidden - apart)))


def hidden_states(
    backbone: Any, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """[R * L, H]: the last hidden states of a base model of transformers, rows one after the other."""
    who: dict[str, Any] = {"attention_mask": None}
    if documents is not None and takes_spans(backbone.config):
        who["spans"] = Spans.of(documents)
    elif documents is not None:
        who["attention_mask"] = attention_mask(documents, backbone.config, backbone.dtype)
    output = backbone(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, **who)
    hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden


class OutputLayer(NamedTuple):
    """Hidden states to logits: the linear layer, and what some models do besides.

    factor  multiplies the logits (Cohere, Granite)
    cap     bounds them softly (Gemma 2), None where there is none
    """

    head: Any
    factor: float
    cap: float | None

    @classmethod
    def of(cls, causal: Any) -> OutputLayer:
        """As the configuration says; what it says in other words, the check at load finds out."""
        config = causal.config
        factor = getattr(config, "logit_scale", None) or 1.0
        if config.model_type.startswith("granite"):
            factor /= getattr(config, "logits_scaling", None) or 1.0
        return cls(causal.get_output_embeddings(), factor, getattr(config, "final_logit_softcapping", None))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V]."""
        logits: torch.Tensor = self.head(hidden)
        if self.factor != 1.0:
            logits = wide(logits) * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(wide(logits) / self.cap)
