"""The baseline of the learner benchmark, a plain transformers loop.

    python -m benchmarks.learner.baselines SPEC ORDER

Rows padded to the longest of their micro-batch, logits of every position in float32, log_softmax, AdamW: a simple first
implementation. ORDER `arrival` keeps the order of arrival, `sorted` sorts trajectories by length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.learner.settings import CLIP_HIGH, CLIP_LOW


class PaddedBatch(NamedTuple):
    """A padded micro-batch: ids, attention, trained, behaviour [B, L] and advantages [B]."""

    ids: torch.Tensor
    attention: torch.Tensor
    trained: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor


def padded_rows(path: Path, each: int, by_length: bool, device: str) -> Iterator[PaddedBatch]:
    """Yield micro-batches of `each` trajectories."""
    with np.load(path) as file:
        data: dict[str, Any] = {name: file[name] for name in file.files}
    lengths = data["lengths"]
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(lengths, kind="stable") if by_length else np.arange(len(lengths))
    for at in range(0, len(order), each):
        members = order[at : at + each]
        width = int(lengths[members].max())

        def padded(name: str, members: Any = members, width: int = width) -> torch.Tensor:
            rows = np.zeros((len(members), width), data[name].dtype)
            for row, member in zip(rows, members, strict=True):
                row[: lengths[member]] = data[name][starts[member] : starts[member] + lengths[member]]
            return torch.from_numpy(rows).to(device)

        attention = torch.from_numpy(np.arange(width) < lengths[members][:, None]).long().to(device)
        advantages = torch.from_numpy(data["advantages"][members]).to(device)
        yield PaddedBatch(padded("ids"), attention, padded("mask"), padded("behaviour"), advantages)


def loss_of(model: Any, rows: PaddedBatch, tokens: int) -> torch.Tensor:
    """Return the micro-batch's part of the GRPO loss: clipped surrogate, mean over `tokens` trained tokens."""
    logits = model(input_ids=rows.ids, attention_mask=rows.attention, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, rows.ids[:, 1:, None]).squeeze(-1)
    trained, gain = rows.trained[:, 1:], rows.advantages[:, None]
    ratio = torch.exp(logprobs - rows.behaviour[:, 1:])
    losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
    return (losses * trained).sum() / tokens


def main(argv: Sequence[str]) -> None:
    """Serve until the input ends."""
    from benchmarks.learner.ours import own_stdout, serve

    pipe = own_stdout()
    from transformers import AutoModelForCausalLM

    spec = json.loads(Path(argv[0]).read_text())
    settings = spec["settings"]
    torch.set_num_threads(settings["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).to(device).train()
    if settings["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    micro_batches = list(padded_rows(Path(spec["batch"]), spec["each"], argv[1] == "sorted", device))
    tokens = int(sum(rows.trained.sum() for rows in micro_batches))

    def step() -> dict[str, float]:
        total = 0.0
        for rows in micro_batches:
            with torch.autocast(device, torch.bfloat16, enabled=settings["dtype"] == "bfloat16"):
                loss = loss_of(model, rows, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "grad_norm": float(norm)}

    serve(pipe, step, tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
