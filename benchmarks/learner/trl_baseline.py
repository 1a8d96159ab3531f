"""TRL's GRPOTrainer in the learner benchmark. Run it with an interpreter that has TRL; it does not need Foray:
`python trl_baseline.py SPEC`.

It uses TRL's training loop, collator, padding, shuffling, loss, clipping and optimiser. Only generation and scoring are
replaced by the batch that all contenders train on. For each input line it runs one step and writes a line of figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PIPE = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # redirect output of libraries to stderr

import numpy as np  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]  # noqa: E402


def load_batch(path: str) -> dict[str, Any]:
    """Return the result of `_generate_and_score_completions`: prompts left-padded, completions right-padded."""
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    lengths, prompts = data["lengths"], data["prompts"]
    starts = np.cumsum(lengths) - lengths
    count, prompt, longest = len(lengths), int(prompts.max()), int((lengths - prompts).max())
    prompt_ids, prompt_mask = np.zeros((count, prompt), np.int64), np.zeros((count, prompt), np.int64)
    ids, mask = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.int64)
    trained, old = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.float32)
    for row in range(count):
        first, split, end = starts[row], starts[row] + prompts[row], starts[row] + lengths[row]
        prompt_ids[row, prompt - prompts[row] :] = data["ids"][first:split]
        prompt_mask[row, prompt - prompts[row] :] = 1
        n = end - split
        ids[row, :n], mask[row, :n] = data["ids"][split:end], 1
        trained[row, :n], old[row, :n] = data["mask"][split:end], data["behaviour"][split:end]
    arrays = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "tool_mask": trained,
        "old_per_token_logps": old,
        "advantages": data["advantages"],
        "num_items_in_batch": np.array(float(trained.sum())),
    }
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


class GivenBatch(GRPOTrainer):  # type: ignore[misc]
    """Train on one fixed batch, independent of the prompts."""

    given: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return {name: value.to(self.accelerator.device) for name, value in self.given.items()}


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Wait for a line before each step, and answer with the figures of the step."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.begun, self.seconds, self.start = tokens, 0.0, 0.0, 0.0
        self.cpu = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.start:
            self.start = peak_mib()
            tell({"ready": True})
        if not sys.stdin.readline():
            PIPE.close()
            os._exit(0)
        self.begun, self.cpu = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds, self.cpu = time.monotonic() - self.begun, time.process_time() - self.cpu

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        figures = {"tokens_per_s": self.tokens / self.seconds, "seconds": self.seconds}
        figures["cpu_ms_per_token"] = 1000 * self.cpu / self.tokens
        norms = {"loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"])}
        tell(figures | norms | {"start_mib": self.start, "peak_mib": peak_mib()})


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=PIPE, flush=True)


def peak_mib() -> float:
    """Return the peak memory, as in ours.py, which this interpreter may not have."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def config_of(spec: dict[str, Any], directory: Path, count: int) -> GRPOConfig:
    """Return the configuration of the same step: loss over all trained tokens, same clipping, no reference, AdamW."""
    settings = spec["settings"]
    return GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=spec["each_trl"],
        gradient_accumulation_steps=count // spec["each_trl"],
        num_generations=settings["group_size"],
        max_steps=1_000_000,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        gradient_checkpointing=settings["gradient_checkpointing"],
        bf16=settings["dtype"] == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train until the input ends."""
    path = Path(sys.argv[1])
    spec = json.loads(path.read_text())
    torch.set_num_threads(spec["settings"]["threads"])
    batch = load_batch(spec["batch"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    count = len(batch["advantages"])
    trainer = GivenBatch(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config_of(spec, path.parent, count),
        train_dataset=Dataset.from_dict({"prompt": [f"{i}" for i in range(count)]}),
        processing_class=tokenizer,
        callbacks=[Rounds(int(batch["tool_mask"].sum()))],
    )
    trainer.given = batch
    trainer.train()


if __name__ == "__main__":
    main()
