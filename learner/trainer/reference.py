"""The reference policy of the divergence: frozen, a moving average of the policy, or a periodic copy.

The average itself is in the policy's engine, in float32, partitioned and saved like its optimiser state: in bfloat16
most of an update of (1 - tau) * difference would be lost. This file has a module to score with, in the dtype of a
forward pass, refilled after each change. At ZeRO stage 3 torch's `fully_shard` shards it over the ranks, because it
does not fit on one device (nothing is optimised here, so a second DeepSpeed engine is not needed): each rank keeps its
share of every parameter, and whole layers for a moment. Below stage 3 every rank has the whole module. A copy is an
average with tau 0, so it also survives a restart.
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
from learner.model.stored_weights import StoredWeights
from protocol.errors import UserError


def shard(module: PolicyModel, device: torch.device) -> None:
    """Shard `module` in place over all ranks, layer by layer; its forward pass is collective from now on.

    Weights that are still in their files are read layer by layer, so a rank holds its share and one whole layer.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    if module.stored is None:
        module.to(device)
    for layers in [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]:
        for layer in layers:
            _read(module.stored, layer, device)
            fully_shard(layer, mesh=mesh)
    _read(module.stored, module, device)
    # The rest (embedding, last norm, output layer) belongs to the module; by default it would stay gathered after use.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    module.stored = None


def _read(stored: StoredWeights | None, part: torch.nn.Module, device: torch.device) -> None:
    for parameter in part.parameters():
        if stored is not None and stored.holds(parameter):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            stored.read(parameter, whole, 0, whole.numel())
            parameter.data = whole


@torch.no_grad()
def fill(module: torch.nn.Module, state: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy whole tensors into the parameters of these names, rounded to their dtype, or this rank's share of them.

    Names unknown to `module` are skipped (a value head's). No communication.
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
    """The part of the policy's engine that a reference needs; `learner.engine.DeepSpeedEngine` implements it."""

    updates: int
    world_size: int

    @property
    def stage(self) -> int:
        """ZeRO's."""

    @property
    def module(self) -> torch.nn.Module:
        """Return the policy."""

    @property
    def device(self) -> torch.device:
        """Return its device."""

    def forward(self, *inputs: Any) -> Any:
        """Return the policy's forward pass."""

    def start_ema(self) -> None:
        """Start a moving average at the current parameters."""

    def update_ema(self, tau: float) -> None:
        """Set average = tau * average + (1 - tau) * parameters."""

    def iter_state(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (parameter name, whole float32 tensor); collective."""


class Reference:
    """Scores tokens under the reference policy. `module` None: the policy itself without adapters."""

    def __init__(self, settings: ReferenceSettings, module: PolicyModel | None, engine: PolicyEngine) -> None:
        self._settings, self._module, self._engine = settings, module, engine
        self._tau = settings.tau if settings.kind == "ema" else 0.0
        self._seen = engine.updates
        self._offloads = settings.offload
        if settings.kind != "frozen":
            engine.start_ema()
        if module is not None and engine.stage == 3 and engine.world_size > 1:
            shard(module, engine.device)
            self._offloads = False  # sharded: little memory on each device
        elif module is not None and share_frozen(module, engine.module):
            self._offloads = False
        if module is not None and not self._offloads:
            module.to(engine.device)

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Scores:
        """Return scores without gradient; arguments as `PolicyModel.forward`. Collective at stage 3."""
        if self._module is not None:
            return self._module(*inputs)  # type: ignore[no-any-return]
        with adapters_off(self._engine.module):
            return self._engine.forward(*inputs)  # type: ignore[no-any-return]

    def onload(self) -> None:
        """Move the module to the device, before `forward`."""
        if self._module is not None:
            self._module.to(self._engine.device)

    def offload(self) -> None:
        """Move the module off the device if `offload` is set, until the next `onload`."""
        if self._module is not None and self._offloads:
            self._module.to("cpu")

    def after_update(self, updates: int) -> None:
        """Update from the policy after every `every` of its updates, at most once per call; collective.

        updates  updates applied to the policy so far; no update at 0
        """
        due = updates // self._settings.every > self._seen // self._settings.every
        self._seen = updates
        if self._settings.kind != "frozen" and due:
            self._engine.update_ema(self._tau)
            self._fill()

    def reload(self) -> None:
        """Restore the reference after a resume, as of the engine's saved state; collective."""
        self._seen = self._engine.updates
        if self._settings.kind != "frozen":
            self._fill()

    def _fill(self) -> None:
        assert self._module is not None
        fill(self._module, self._engine.iter_state("ema"))


def share_frozen(module: torch.nn.Module, policy: torch.nn.Module) -> bool:
    """Share the frozen parameters of an adapted `policy` with `module`; return False if there are none to share: all
    are trained, partitioned (ZeRO stage 3 empties them), or of another dtype.
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
    settings: ReferenceSettings,
    run_model: Path,
    model: ModelSettings,
    engine: PolicyEngine,
    *,
    packed: bool = True,
    shared: bool = False,
) -> Reference:
    """Return the reference at the beginning of a run: `settings.model`, or the run's initial model; collective.

    With adapters the initial model needs no copy: it is the policy without them. A reference may have more ids than
    the policy (Qwen2.5 pads its vocabulary by size), which are ignored. Raises UserError as `load_policy`, and
    for a reference with fewer.
    """
    frozen = settings.kind == "frozen"
    if frozen and settings.model is None and model.lora.rank:
        return Reference(settings, None, engine)
    changed: dict[str, Any] = {"dtype": model.fixed_dtype, "gradient_checkpointing": False}
    if frozen:
        changed["lora"] = LoraSettings()
    sharded = engine.stage == 3 and engine.world_size > 1
    given = model.model_copy(update=changed)
    module = load_policy(settings.model or run_model, given, packed=packed, shared=shared, sharded=sharded)
    policy = cast(PolicyModel, engine.module)
    if module.vocabulary < policy.vocabulary:
        raise UserError(
            f"the reference {settings.model} has {module.vocabulary} ids, but the policy has {policy.vocabulary}",
            why="it has no probabilities for the remaining ids",
            todo="set learner.reference.model to a model with the policy's tokenizer and at least as many ids",
        )
    module.top_among = policy.vocabulary
    return Reference(settings, module.eval().requires_grad_(False), engine)
