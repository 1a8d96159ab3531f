"""The training loop of `foray sft`: one process, float32 master weights, checkpoints that continue exactly.

The result is a function of the plan, the dtype and the number of threads: a training that was stopped and continued
has the same weights, bit for bit on a CPU. Update `n` depends only on the state after update `n - 1`.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from learner.checkpoint.checkpoint import STATE, Checkpoints
from learner.config.model import LoraSettings
from learner.engine.optimizer import GuardedAdamW, learning_rate, parameter_groups
from learner.model.export import write_model
from learner.model.loading import load_policy, refuse_rounding
from learner.sft.batches import SftExample, SftMicroBatch, examples_of_update, micro_batches
from learner.sft.record import RECORD, SftPlan, SftProgress
from protocol.errors import ForayError, UserError
from protocol.runtime.files import fsync_path, sole_user
from protocol.runtime.number_format import resolve

log = logging.getLogger(__name__)

TENSORS = "training.safetensors"
KEYS = ("master", "exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter (`GuardedAdamW.kept`)."""


class SftFailed(ForayError):
    """A gradient is not finite; the last checkpoint is unchanged."""


def train(plan: SftPlan, report: Callable[[SftProgress], None], should_stop: Callable[[], bool]) -> SftProgress:
    """Train, or continue, and write the model to `plan.out`; return the progress.

    report       called before the first update and after every one
    should_stop  asked after every update; if true, a checkpoint is written, and the result has fewer steps than `steps`
    Raises UserError for a model that cannot be trained, and SftFailed.
    """
    refused = UserError(f"another process trains in {plan.folder}", todo="wait for it, or choose another --out")
    with sole_user(plan.folder, refused):
        trainer = _SftTrainer(plan)
        progress = trainer.run(report, should_stop)
        if progress.step == progress.steps:
            trainer.write()
    return progress


class _SftTrainer:
    """Model, master weights, optimiser and checkpoints of one training."""

    def __init__(self, plan: SftPlan) -> None:
        self._plan = plan
        if plan.trainer.engine.threads:
            torch.set_num_threads(plan.trainer.engine.threads)
        torch.manual_seed(plan.seed)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._checkpoints = Checkpoints(plan.folder / "checkpoints", keep=1)
        facts = self._checkpoints.manifest() or {}
        setting = plan.settings.dtype
        if setting == "auto":  # a training continues as it began
            setting = facts.get("progress", {}).get("dtype") or setting
        chosen = resolve(setting, plan.model, log.warning, lambda: torch, gpu=True)
        dtype = getattr(torch, chosen)
        given = plan.trainer.model.model_copy(update={"dtype": "float32", "lora": LoraSettings()})
        self._policy = load_policy(plan.model, given, packed=plan.trainer.batch.row_tokens > 0)
        if dtype != torch.float32:
            refuse_rounding(plan.model, self._policy.causal, "sft.dtype")
        self._policy.to(self._device).train()
        self._masters: dict[str, torch.Tensor] = {}
        """The parameters themselves in float32, else their float32 copies."""
        self._weights = dict(self._policy.named_parameters())
        groups = parameter_groups(self._policy, plan.settings.weight_decay)
        for name, weight in self._weights.items():
            self._masters[name] = weight
            if dtype != torch.float32:
                self._masters[name] = weight.detach().clone()
                weight.data = weight.data.to(dtype)
        own = {id(weight): self._masters[name] for name, weight in self._weights.items()}
        groups = [group | {"params": [own[id(weight)] for weight in group["params"]]} for group in groups]
        self._optimizer = GuardedAdamW(groups, plan.settings, guard=True)
        self._progress = SftProgress(steps=plan.steps, dtype=chosen)
        self._load()

    def run(self, report: Callable[[SftProgress], None], should_stop: Callable[[], bool]) -> SftProgress:
        """Train until the end or a stop; a checkpoint is written in both cases."""
        progress, plan = self._progress, self._plan
        saved = progress.step
        saved_at = clock = time.monotonic()
        cpu = time.process_time()
        report(progress)
        while progress.step < progress.steps:
            self._update()
            if plan.evaluated and self._ends_epoch():
                progress.evals.append([progress.step, self._evaluate(plan.evaluated)])
            now, now_cpu = time.monotonic(), time.process_time()
            progress.seconds, clock = progress.seconds + now - clock, now
            progress.cpu_seconds, cpu = progress.cpu_seconds + now_cpu - cpu, now_cpu
            report(progress)
            if should_stop():
                break
            if now - saved_at >= plan.settings.checkpoint_s and progress.step < progress.steps:
                self._save()
                saved, saved_at = progress.step, time.monotonic()
        if progress.step > saved:
            self._save()
        return progress

    def write(self) -> None:
        """Write the model; the folder appears when it is complete. Then remove the checkpoints."""
        plan, done = self._plan, self._plan.folder / "model"
        shutil.rmtree(done, ignore_errors=True)
        record = json.dumps({"identity": plan.identity, **self._progress.to_json()}, indent=1) + "\n"
        write_model(self._policy.causal.cpu(), plan.model, self._progress.dtype, done, {RECORD: record})
        done.rename(plan.out)
        fsync_path(plan.out.absolute().parent)
        shutil.rmtree(plan.folder, ignore_errors=True)

    def _update(self) -> None:
        plan, progress = self._plan, self._progress
        numbers = examples_of_update(progress.step, len(plan.examples), plan.settings.batch_size, plan.seed)
        batch = [plan.examples[number] for number in numbers]
        trained = sum(len(example.trained) for example in batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part in micro_batches(batch, plan.trainer.batch):
            share = -self._log_probs(part).sum() / trained
            share.backward()  # type: ignore[no-untyped-call]
            self._collect_gradients()
            loss += share.item()
            progress.tokens += part.tokens
        rate = learning_rate(plan.settings, progress.step, progress.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._optimizer.overflow:
            raise SftFailed(f"the gradient of update {progress.step + 1} is not finite: lower sft.lr")
        self._publish()
        progress.step += 1
        progress.trained_tokens += trained
        progress.last_loss = loss
        if progress.step == 1:
            progress.first_loss = loss

    def _log_probs(self, part: SftMicroBatch) -> torch.Tensor:
        """Return the log-probs of the trained tokens."""
        ids, positions, document_ids, index, targets = (
            torch.from_numpy(array).to(self._device)
            for array in (part.ids, part.positions, part.document_ids, part.index, part.targets)
        )
        packed = document_ids if int(document_ids.max()) > 0 else None
        scores = self._policy(ids, positions, packed, index, targets, 1.0, False)
        logprobs: torch.Tensor = scores.logprobs
        return logprobs

    def _collect_gradients(self) -> None:
        """Move gradients to the float32 masters: sums of many small bfloat16 gradients lose most of them."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the master weights into the model, rounded."""
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])

    def _ends_epoch(self) -> bool:
        updates = -(-len(self._plan.examples) // self._plan.settings.batch_size)
        return self._progress.step % updates == 0 or self._progress.step == self._progress.steps

    @torch.no_grad()
    def _evaluate(self, examples: Sequence[SftExample]) -> float:
        """Return the mean loss of the trained tokens of `examples`."""
        total = sum(-self._log_probs(part).sum().item() for part in micro_batches(examples, self._plan.trainer.batch))
        return total / sum(len(example.trained) for example in examples)

    def _save(self) -> None:
        facts = {"identity": self._plan.identity, "progress": self._progress.to_json()}

        def save(folder: Path) -> None:
            save_file({name: tensor.contiguous() for name, tensor in self._state()}, folder / TENSORS)

        step = self._progress.step
        self._checkpoints.write(facts, step=step, epoch=1, lineage=(), save=save, confirm=lambda: None)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in self._masters.items():
            for key in KEYS:
                yield f"{key}.{name}", self._optimizer.kept(master, key)

    def _load(self) -> None:
        """Continue from the checkpoint, if there is one."""
        found = self._checkpoints.load()
        if found is None:
            return
        self._plan.refuse_other(str(found.facts.get("identity")))
        tensors = load_file(found.path / STATE / TENSORS)
        with torch.no_grad():
            for name, tensor in self._state():
                tensor.copy_(tensors[name])
        self._progress = SftProgress(**found.facts["progress"] | {"dtype": self._progress.dtype})
        self._publish()
