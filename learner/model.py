"""The policy as a module that scores trained tokens: transformers inside, block-diagonal attention around it.

Rows may hold several trajectories. Positions restart in each, and attention is block-diagonal: a boolean [R, 1, L, L]
mask that we build ourselves. transformers would guess the blocks from position ids in some cases and not in others
(a cache or an all-ones mask makes it attend across trajectories without a word), so nothing is left to it. Rows that
hold one trajectory each need no mask at all: attention is causal and the padding comes last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.config_model import ModelSettings
from learner.scoring import Scores, score_hidden
from protocol.errors import UserError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Model types for which packing and the separate output layer are known to be exact (tests/learner/test_model.py)."""


class PolicyModel(torch.nn.Module):
    """A causal language model of transformers; `forward` gives log-probs and entropies of the trained tokens only."""

    def __init__(self, causal: Any, settings: ModelSettings) -> None:
        super().__init__()
        self.causal = causal
        self.vocabulary: int = causal.config.vocab_size
        self.chunk_bytes = settings.logit_chunk_bytes

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor | None,
        index: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> Scores:
        """Scores of the N trained tokens.

        ids, positions [R, L] int64; documents [R, L] int64 or None when no row holds more than one trajectory;
        index [N] int64 into the flattened rows, targets [N] int64.
        """
        mask = None if documents is None else block_mask(documents)
        output = self.causal.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, return_dict=True
        )
        hidden = output.last_hidden_state.flatten(0, 1)[index]
        return score_hidden(
            hidden,
            targets,
            self.causal.get_output_embeddings(),
            temperature=temperature,
            vocabulary=self.vocabulary,
            chunk_bytes=self.chunk_bytes,
            entropy_gradient=entropy_gradient,
        )


def block_mask(documents: torch.Tensor) -> torch.Tensor:
    """[R, 1, L, L] bool: token t sees s when s <= t and both are of one trajectory (padding sees padding)."""
    same = documents[:, :, None] == documents[:, None, :]
    return torch.tril(same)[:, None]


def load_policy(directory: Path, settings: ModelSettings) -> PolicyModel:
    """The model in `directory` (Hugging Face layout), on the CPU; UserError when it is missing or of another kind."""
    if not (directory / "config.json").is_file():
        raise UserError(
            f"there is no model in {directory}",
            why="run.model must be a directory with config.json, weights and tokenizer",
            todo="give run.model=DIR",
        )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar in a log file is noise
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    _refuse_other_attention(directory, config)
    config.attention_dropout = 0.0  # dropout would make the ratio to the sampler's policy noise
    causal = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=getattr(torch, settings.dtype),
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
    )
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(causal, settings)


def _refuse_other_attention(directory: Path, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in ARCHITECTURES or kinds != {"full_attention"}:
        raise UserError(
            f"{directory} holds a {config.model_type} model with {', '.join(sorted(kinds))}",
            why="packing trajectories into one row is only known to be exact for full attention in "
            + ", ".join(ARCHITECTURES),
            todo="use a model of one of these types",
        )
