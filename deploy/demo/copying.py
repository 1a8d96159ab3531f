"""Initial weights with a beginning of copying: the parts of an induction circuit, laid by hand.

What a small transformer learns last is to look a word up in its context and to continue as the context did. That takes
two attention heads in a row (Olsson et al. 2022, "In-context learning and induction heads"): one that brings each
position the word before it, and one that finds the position whose word before is the present word, and repeats what
stands there. From random weights the pair appears after many hundreds of steps or, with an unlucky seed, not at all.
Laid by hand, the first looks back sharply and the second has a slight lead, which is enough: about a hundred steps
do the rest. All of it stays trainable.

The hidden state is halved: the first half of the channels holds the present word, the second half the word before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen2ForCausalLM

SHARPNESS = 30.0
"""Squared amplitude of the previous-word head's score in each of its rotation frequencies."""
GAIN = 1.5
"""Amplitude of the match between the present word and a word before."""
REPEAT = 1.5
"""How strongly what was found is repeated, against a normalised state."""
FAST, SLOW = 0.03, 0.012
"""Rotary frequencies (radians a position): positions are told apart above FAST; below SLOW they hardly matter."""
INDUCTION_LAYERS = (1, 2)


def lay_copying(model: Qwen2ForCausalLM, theta: float) -> None:
    """Overwrite embeddings, head 0 (and its queries' sibling) of layer 0 and head 0 of INDUCTION_LAYERS, in place.

    model  Qwen2 whose head_dim is half its hidden_size; theta is its rotary base.
    """
    import torch

    config = model.config
    width, half = config.hidden_size // 2, config.hidden_size // 4
    assert config.head_dim == width, "a head must hold one half of the hidden state"
    frequency = theta ** (-torch.arange(half) / half)
    with torch.no_grad():
        words: Tensor = model.model.embed_tokens.weight
        words.normal_(0.0, 0.02)
        words[:, :width].normal_(0.0, 1.0 / math.sqrt(width))
        _previous_word(model, frequency, width)
        for layer in INDUCTION_LAYERS:
            _induction(model, layer, frequency, width)


def _previous_word(model: Qwen2ForCausalLM, frequency: Tensor, width: int) -> None:
    """Head 0 of layer 0 attends one position back by its biases alone, head 1 (same keys) two back.

    With key bias a at angle 0 and query bias a at angle -d * frequency the rotary score of distance D is
    sum a^2 cos(frequency * (D - d)), highest at D = d.
    """
    import torch

    attention = model.model.layers[0].self_attn
    fast = torch.arange(len(frequency))[frequency > FAST]
    amplitude = math.sqrt(SHARPNESS)
    attention.k_proj.weight[:width] = 0.0
    attention.k_proj.bias[:width] = 0.0
    attention.k_proj.bias[fast] = amplitude
    for head, distance in ((0, 1), (1, 2)):
        query = torch.zeros(width)
        query[fast] = amplitude * torch.cos(-distance * frequency[fast])
        query[fast + len(frequency)] = amplitude * torch.sin(-distance * frequency[fast])
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[rows] = 0.0
        attention.q_proj.bias[rows] = query
    present, before = slice(0, width), slice(width, 2 * width)
    attention.v_proj.weight[:width] = 0.0
    attention.v_proj.weight[:width, present] = torch.eye(width)
    attention.o_proj.weight[:, :width] = 0.0
    attention.o_proj.weight[before, :width] = torch.eye(width) / math.sqrt(2 * width)


def _induction(model: Qwen2ForCausalLM, layer: int, frequency: Tensor, width: int) -> None:
    """Head 0 asks with the present word for a word before, in the channels that rotate too slowly to tell distance."""
    import torch

    attention = model.model.layers[layer].self_attn
    slow = torch.arange(len(frequency))[frequency < SLOW]
    channels = torch.cat([slow, slow + len(frequency)])
    basis = torch.linalg.qr(torch.randn(width, width))[0][: len(channels)] * GAIN
    attention.q_proj.weight[:width] = 0.0
    attention.k_proj.weight[:width] = 0.0
    attention.q_proj.weight[channels, :width] = basis
    attention.k_proj.weight[channels, width:] = basis
    attention.v_proj.weight[:width] = 0.0
    attention.v_proj.weight[:width, :width] = torch.eye(width)
    attention.o_proj.weight[:, :width] = 0.0
    attention.o_proj.weight[:width, :width] = torch.eye(width) * REPEAT / math.sqrt(2 * width)
