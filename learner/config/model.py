"""Settings of the models that the learner holds, of the optimiser and of DeepSpeed. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.settings import Settings


class OptimSettings(Settings):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0)
    """Highest learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 = never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, over run.steps steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise from lr / warmup_steps."""
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all updates of the run (Search-R1: 0.285); not together with warmup_steps."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """linear and cosine end at this share of lr."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimSettings:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, not both")
        return self


OURS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("managed_gradient_accumulation", "gradient_clipping", "optimizer", "scheduler", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "bf16", "fp16", "torch_autocast", "data_types"),
    *(
        f"zero_optimization.{key}"
        for key in (
            *("stage", "overlap_comm", "reduce_bucket_size", "offload_optimizer", "offload_param"),
            *("zero_hpz_partition_size", "compute_grad_norm", "elastic_checkpoint", "zenflow"),
        )
    ),
}
"""What `DeepSpeedSettings.deepspeed` may not say: other settings say it, or the learner relies on it."""


class DeepSpeedSettings(Settings):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is partitioned over the ranks: nothing, optimiser, and gradients, and parameters."""
    deterministic: bool = False
    """Only operations that give the same bits every time, slower ones on a GPU; torch refuses those that have none.
    On a CPU with a fixed number of threads nothing changes."""
    threads: int = Field(default=0, ge=0)
    """Threads torch computes with on a CPU; 0 = its own choice. The same bits come only of the same number."""
    gradient_dtype: Literal["float32", "model"] = "float32"
    """In what micro-batches' gradients are added up when the model is bfloat16; `model` halves the memory for it."""
    offload_optimizer: bool = False
    """Keep master weights and moments in the memory of the CPU, which then does the update (zero_stage 1 or more)."""
    offload_params: bool = False
    """Keep the parameters there too, between their uses (zero_stage 3)."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass goes on (zero_stage 2 or 3): faster on GPUs, more memory."""
    reduce_bucket: int = Field(default=0, ge=0)
    """Numbers that are reduced at a time; 0 = 500 million, or all of a smaller model. Fewer take less memory."""
    allgather_bucket: int = Field(default=0, ge=0)
    """Numbers that are gathered at a time (at stage 3: fetched ahead); 0 = DeepSpeed's own choice."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """More of DeepSpeed's own configuration, merged last; keys that other settings here stand for are refused."""

    @field_validator("deepspeed")
    @classmethod
    def _not_ours(cls, extra: dict[str, Any]) -> dict[str, Any]:
        zero = extra.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError("zero_optimization must be a mapping")
        said = {*extra, *(f"zero_optimization.{key}" for key in zero)}
        clash = sorted(said & OURS)
        if clash:
            raise ValueError(f"{', '.join(clash)}: the learner sets this itself")
        return extra

    @model_validator(mode="after")
    def _stage_allows(self) -> DeepSpeedSettings:
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_params and self.zero_stage != 3:
            raise ValueError("offload_params needs zero_stage 3")
        if self.overlap_comm and self.zero_stage < 2:
            raise ValueError("overlap_comm needs zero_stage 2 or 3")
        return self


class LoraSettings(Settings):
    """Low-rank adapters (arXiv 2106.09685): only they are trained, the model's own weights stay.

    There is no dropout (the sampler has none, and the ratio to it would be noise) and no rank-stabilised scale
    (alpha * sqrt(rank) gives the same).
    """

    rank: int = Field(default=0, ge=0)
    """Of every adapter; 0 trains all weights instead. An adapter likes ten times the learning rate of full training."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's product counts alpha / rank. learner.publish.alpha of the adapter transport must say the same."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get one, e.g. [q_proj, v_proj]; none = all but the output layer."""


class ModelSettings(Settings):
    """How the policy is held and computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in the forward pass; the optimiser keeps float32 (bfloat16 needs zero_stage 1 or more)."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """torch's fused attention, or transformers' own steps, which some models need (Gemma 2) and which cost memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    logit_chunk_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """Most bytes for logits and what is made of them, at once; the output layer is computed in chunks of that size."""
    fp32_lm_head: bool = True
    """Logits of bfloat16 weights are float32 (MiniMax-M1, arXiv 2506.13585), as engine.kind.fp32_lm_head makes those of
    SGLang; off: they are rounded to bfloat16, and log-probs are wrong by hundredths of a nat."""
    lora: LoraSettings = LoraSettings()
    """Train adapters instead of all weights."""


class CriticOptimSettings(OptimSettings):
    """The critic's optimiser."""

    lr: float = Field(default=1e-5, gt=0)
    """Highest learning rate; a critic takes larger steps than a policy."""


class CriticSettings(Settings):
    """The value model of algorithms with a critic."""

    backbone: Literal["own", "policy"] = "own"
    """Its own model, or a head on the policy: half the memory, and both shape the same features."""
    model: Path | None = None
    """backbone own: directory of the model that it starts from; none = run.model."""
    optim: CriticOptimSettings = CriticOptimSettings()
    """backbone own: its optimiser. A head on the policy moves with the policy's."""
    clip: float = Field(default=0.5, ge=0)
    """New values count within this distance of those before the update (PPO's value clipping); 0 = never clipped."""
    loss: Literal["squared", "huber"] = "squared"
    """Half the squared error, or Huber's, which grows linearly beyond huber_delta."""
    huber_delta: float = Field(default=10.0, gt=0)
    """loss huber: where it becomes linear."""
    coefficient: float = Field(default=0.5, gt=0)
    """backbone policy: weight of the value loss beside the policy's."""
    backbone_gradient: float = Field(default=0.1, ge=0)
    """backbone policy: share of the value loss's gradient that goes on into the policy; 0 trains the head alone."""
    head_lr_scale: float = Field(default=10.0, gt=0)
    """backbone policy: the head's learning rate, in units of the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """backbone own: steps at the beginning of a run in which the critic learns alone."""

    @model_validator(mode="after")
    def _model_is_of_its_own(self) -> CriticSettings:
        if self.backbone == "policy" and self.model is not None:
            raise ValueError("critic.model is of no use with critic.backbone policy")
        return self


class ReferenceSettings(Settings):
    """The policy that the divergence is measured from; held only by algorithms that ask for one."""

    kind: Literal["frozen", "ema", "refresh"] = "frozen"
    """Never moves; or an exponential moving average of the policy (EMA-PG, arXiv 2602.04417); or a copy made now and
    then."""
    model: Path | None = None
    """kind frozen: directory of another model with the same tokenizer (it may have more ids); none = run.model."""
    tau: float = Field(default=0.9, ge=0, lt=1)
    """kind ema: share of the old average that is kept at each of its updates."""
    every: int = Field(default=10, ge=1)
    """kinds ema and refresh: optimiser updates of the policy from one to the next."""
    offload: bool = False
    """Keep it in main memory while it is not computing."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of its forward pass; none = the policy's. The moving average itself is always float32."""

    @model_validator(mode="after")
    def _model_is_frozen(self) -> ReferenceSettings:
        if self.kind != "frozen" and self.model is not None:
            raise ValueError("reference.model is of use with reference.kind frozen only: others follow the policy")
        return self
