"""Settings of the learner's models, optimiser and DeepSpeed. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.runtime.number_format import Dtype, DtypeSetting
from protocol.settings import Settings


class OptimSettings(Settings):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's beta2: decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon, added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) never decay."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0: never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up, over run.steps steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from lr / warmup_steps."""
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Warm-up as a share of all updates of the run (Search-R1: 0.285); not together with warmup_steps."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of linear and cosine, as a share of lr."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimSettings:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("set warmup_steps or warmup_fraction, not both")
        return self


OURS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("managed_gradient_accumulation", "gradient_clipping", "optimizer", "scheduler", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "bf16", "fp16", "torch_autocast"),
    *(
        f"zero_optimization.{key}"
        for key in (
            *("stage", "overlap_comm", "offload_optimizer", "offload_param"),
            *("zero_hpz_partition_size", "compute_grad_norm", "elastic_checkpoint", "zenflow"),
        )
    ),
}
"""Keys that `DeepSpeedSettings.deepspeed` may not contain: other settings set them, or the learner needs its own
values."""


class DeepSpeedSettings(Settings):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, partitioned over the ranks: 0 nothing, 1 optimiser, 2 also gradients, 3 also parameters."""
    deterministic: bool = False
    """Use only deterministic operations, slower on a GPU; torch refuses operations that have no deterministic form.
    No effect on a CPU with a fixed number of threads."""
    threads: int = Field(default=0, ge=0)
    """Number of CPU threads of torch; 0: torch's default. Bit-identical results need the same number."""
    offload_optimizer: bool = False
    """Keep master weights and moments in CPU memory and update them on the CPU (zero_stage 1 or more)."""
    offload_params: bool = False
    """Also keep the parameters in CPU memory between uses (zero_stage 3)."""
    overlap_comm: bool = False
    """Reduce gradients during the backward pass (zero_stage 2 or 3): faster on GPUs, more memory."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed configuration, merged last, e.g. {zero_optimization: {reduce_bucket_size: 100000000}} for less
    memory; keys that other settings here set are refused."""

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
    """Low-rank adapters (arXiv 2106.09685): only they are trained; the model's own weights stay fixed.

    There is no dropout (the engine has none, so the ratio would be noisy) and no rank-stabilised scale
    (alpha * sqrt(rank) gives the same).
    """

    rank: int = Field(default=0, ge=0)
    """Rank of every adapter; 0 trains all weights. Use about ten times the learning rate of full training."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers with an adapter, e.g. [q_proj, v_proj]; empty: all but the output layer, experts,
    routers, and layers whose names peft takes for experts (the log lists them)."""


class ModelSettings(Settings):
    """Dtype, attention and memory use of the policy."""

    dtype: DtypeSetting = "auto"
    """Dtype of the weights in the forward pass; the optimiser keeps float32. auto: as in the run's checkpoint, if there
    is one, else bfloat16 on a GPU or a CPU that is faster in it; float32 with zero_stage 0, below 10 million
    parameters, and for models that keep weights in float32."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention: torch's fused sdpa, or transformers' eager, which some models need (Gemma 2) and which uses more
    memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    logit_chunk_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """Maximum bytes for logits and values derived from them; the output layer is computed in chunks of that size."""
    fp32_lm_head: bool = True
    """Compute the logits of bfloat16 weights in float32 (MiniMax-M1, arXiv 2506.13585), as engine.kind.fp32_lm_head
    does in SGLang; false: they are rounded to bfloat16, and log-probs are wrong by hundredths of a nat."""
    lora: LoraSettings = LoraSettings()
    """LoRA: train adapters instead of all weights."""

    @property
    def fixed_dtype(self) -> Dtype:
        """Return the dtype; float32 for an `auto` that no trainer has resolved, as in an export or a check."""
        return "float32" if self.dtype == "auto" else self.dtype


class CriticOptimSettings(OptimSettings):
    """The critic's optimiser."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate; higher than a policy's."""


class CriticSettings(Settings):
    """The value model of algorithms with a critic."""

    backbone: Literal["own", "policy"] = "own"
    """`own`: a separate model; `policy`: a head on the policy, with half the memory and shared features."""
    model: Path | None = None
    """backbone own: directory of its initial model; null: run.model."""
    optim: CriticOptimSettings = CriticOptimSettings()
    """backbone own: its optimiser. A head on the policy uses the policy's."""
    clip: float = Field(default=0.5, ge=0)
    """PPO's value clipping: maximum distance of new values from those before the update; 0: off."""
    coefficient: float = Field(default=0.5, gt=0)
    """backbone policy: weight of the value loss relative to the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """backbone own: steps at the beginning of a run that train only the critic."""

    @model_validator(mode="after")
    def _model_is_of_its_own(self) -> CriticSettings:
        if self.backbone == "policy" and self.model is not None:
            raise ValueError(
                "critic.model has no effect with critic.backbone policy: remove it, or set critic.backbone own"
            )
        return self


class ReferenceSettings(Settings):
    """Reference policy of the divergence; loaded only if the algorithm needs it."""

    kind: Literal["frozen", "ema", "refresh"] = "frozen"
    """`frozen` never changes; `ema` is an exponential moving average of the policy (EMA-PG, arXiv 2602.04417);
    `refresh` is a periodic copy of the policy."""
    model: Path | None = None
    """kind frozen: directory of another model with the same tokenizer (it may have more ids); null: run.model."""
    tau: float = Field(default=0.9, ge=0, lt=1)
    """kind ema: decay, the share of the old average kept at each update."""
    every: int = Field(default=10, ge=1)
    """kinds ema and refresh: optimiser updates of the policy between two updates of the reference."""
    offload: bool = False
    """Keep the reference in main memory while it is not in use."""

    @model_validator(mode="after")
    def _model_is_frozen(self) -> ReferenceSettings:
        if self.kind != "frozen" and self.model is not None:
            raise ValueError("reference.model needs reference.kind frozen: the other kinds follow the policy")
        return self
