"""The policy that divergence is measured from: frozen, a moving average of the trained one, or its copy now and then.

The average itself lives in the policy's engine, in float32 and partitioned as its optimiser's state is, and is saved
with it: in bfloat16 most of an update of (1 - tau) * difference would be lost. What is here is a module to score with,
in the dtype of a forward pass, filled again after each change. At ZeRO stage 3 it is cut over the ranks by torch's
`fully_shard` (nothing is optimised here, so no second DeepSpeed engine), since the model does not fit on one device:
each rank holds its share of every parameter, and whole layers for a moment. Below that stage it is whole on each. A
copy is an average that keeps nothing of the past (tau 0), so it survives a restart likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.config.model import LoraSettings, ModelSettings, ReferenceSettings
from learner.model.loading import load_policy
from learner.model.logprobs import Scores
from learner.model.lora import adapters_off
from learner.model.policy import PolicyModel
from protocol.errors import UserError


def shard(module: torch.nn.Module, device: torch.device) -> None:
    """Cut `module` in place over all ranks, layer by layer; its forward pass is collective from now on."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    module.to(device)
    for layers in [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    # The rest (embedding, last norm, output layer) is the module's own; by default it would stay whole once used.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


@torch.no_grad()
def fill(module: torch.nn.Module, state: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy whole tensors into the parameters of these names, rounded to their dtype, or this rank's share of them.

    Names that `module` has not are passed over (a value head's). Nothing is communicated.
    """
    parameters = dict(module.named_parameters())
    for name, tensor in state:
        own = parameters.get(name)
        if isinstance(own, DTensor):
            there = tensor.to(own.device)
            share = distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)
            own.to_local().copy_(share.to_local())
        elif own is not None:
            own.copy_(tensor)


class PolicyEngine(Protocol):
    """What a reference needs of the engine that trains the policy; `learner.engine.DeepSpeedEngine` has it."""

    updates: int
    world_size: int

    @property
    def stage(self) -> int:
        """ZeRO's."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The policy."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def forward(self, *inputs: Any) -> Any:
        """Return the policy's forward pass."""
        ...

    def start_ema(self) -> None:
        """From now on an average of the trained parameters is kept; it begins with them."""
        ...

    def update_ema(self, tau: float) -> None:
        """average = tau * average + (1 - tau) * parameters."""
        ...

    def iter_state(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, whole float32 tensor); collective."""
        ...


class Reference:
    """Scores of a policy that the present one is compared with. `module` None: the policy itself without adapters."""

    def __init__(self, settings: ReferenceSettings, module: PolicyModel | None, engine: PolicyEngine) -> None:
        self._settings, self._module, self._engine = settings, module, engine
        self._tau = settings.tau if settings.kind == "ema" else 0.0
        self._seen = engine.updates
        self._offloads = settings.offload
        if settings.kind != "frozen":
            engine.start_ema()
        if module is not None and engine.stage == 3 and engine.world_size > 1:
            shard(module, engine.device)
            self._offloads = False  # little is left on each device
        elif module is not None and share_frozen(module, engine.module):
            self._offloads = False
        if module is not None and not self._offloads:
            module.to(engine.device)

    @torch.no_grad()
    def scores(self, *inputs: Any, top: int = 0, at_ids: torch.Tensor | None = None) -> Scores:
        """Without gradient; takes what `PolicyModel.forward` takes, up to `entropy_gradient`. At stage 3 collective."""
        if self._module is not None:
            return self._module(*inputs, top, at_ids)  # type: ignore[no-any-return]
        with adapters_off(self._engine.module):
            return self._engine.forward(*inputs, top, at_ids)  # type: ignore[no-any-return]

    def onload(self) -> None:
        """Onto the device, before `scores`."""
        if self._module is not None:
            self._module.to(self._engine.device)

    def offload(self) -> None:
        """Off the device where `offload` says so, until the next `onload`."""
        if self._module is not None and self._offloads:
            self._module.to("cpu")

    def after_update(self, updates: int) -> None:
        """Follow the policy when another `every` of its updates are done: at most once a call; collective.

        updates  applied to the policy so far; never followed at 0
        """
        due = updates // self._settings.every > self._seen // self._settings.every
        self._seen = updates
        if self._settings.kind != "frozen" and due:
            self._engine.update_ema(self._tau)
            self._fill()

    def reload(self) -> None:
        """After a resume: be what it was when the engine's state was saved; collective."""
        self._seen = self._engine.updates
        if self._settings.kind != "frozen":
            self._fill()

    def _fill(self) -> None:
        assert self._module is not None
        fill(self._module, self._engine.iter_state("ema"))


def share_frozen(module: torch.nn.Module, policy: torch.nn.Module) -> bool:
    """Let the frozen parameters of an adapted `policy` be those of `module` too; False where there are none to share:
    all are trained, or partitioned (ZeRO stage 3 empties them), or of another dtype.
    """
    frozen = {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    own = dict(module.named_parameters())
    if not frozen or any(
        name not in own or own[name].shape != p.shape or own[name].dtype != p.dtype for name, p in frozen.items()
    ):
        return False
    for name, parameter in frozen.items():
        own[name].data = parameter.data
    return True


def build_reference(
    settings: ReferenceSettings, run_model: Path, model: ModelSettings, engine: PolicyEngine, *, packed: bool = True
) -> Reference:
    """Return the reference at the beginning of a run: `settings.model`, or the run's initial model; collective.

    The initial model under adapters needs no copy: it is the policy without them. A reference may have more ids than
    the policy (Qwen2.5 pads its vocabulary by size), of which none is looked at. Raises UserError as `load_policy`, and
    for a reference with fewer.
    """
    frozen = settings.kind == "frozen"
    dtype = settings.dtype or model.dtype
    if frozen and settings.model is None and model.lora.rank and dtype == model.dtype:
        return Reference(settings, None, engine)
    changed: dict[str, Any] = {"dtype": dtype, "gradient_checkpointing": False}
    if frozen:
        changed["lora"] = LoraSettings()
    module = load_policy(settings.model or run_model, model.model_copy(update=changed), packed=packed)
    policy = cast(PolicyModel, engine.module)
    if module.vocabulary < policy.vocabulary:
        raise UserError(
            f"the reference {settings.model} has {module.vocabulary} ids, the policy {policy.vocabulary}",
            why="it has no probability for the others",
            todo="set learner.reference.model to a model of the policy's tokenizer with as many ids or more",
        )
    module.top_among = policy.vocabulary
    return Reference(settings, module.eval().requires_grad_(False), engine)
