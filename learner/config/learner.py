"""Settings of the learner: section `learner` of the tree. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from learner.config.algorithm import AlgorithmSettings, GrpoSettings
from learner.config.model import CriticSettings, DeepSpeedSettings, ModelSettings, OptimSettings, ReferenceSettings
from learner.config.trackers import TrackerSettings
from protocol.errors import UserError
from protocol.settings import RunSettings, Settings


class FilterSettings(Settings):
    """Dynamic filtering (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing are left out.

    A group whose valid trajectories all earned the same is settled as filtered and never trained; another seq is
    issued in its place. Redis holds filtered groups, too, until the next checkpoint.
    """

    metric: str = ""
    """Part of the reward that must differ within a group, e.g. `em`; `reward` is the whole; "" filters nothing, unless
    the algorithm asks for it (`algorithm.filter`): then the whole reward decides."""
    patience: int = Field(default=8, ge=1)
    """After this many batches' worth of filtered groups in a row, groups are taken as they come until a step is done: a
    policy that is always right or always wrong must not stand still unnoticed."""


class MixSettings(Settings):
    """Off-policy mix: groups that were trained in the last steps are trained again, beside the new ones.

    On purpose, and beside the accounting: "each seq is trained at most once" counts the commits of a seq.
    """

    share: float = Field(default=0.0, ge=0, le=4)
    """Groups mixed into a batch, as a share of `run.groups_per_step`. They are drawn by `run.seed` and the step, from
    those that no more than `run.max_lag` steps separate from the version that began them. 0: none."""


class ReplaySettings(Settings):
    """Training from a journal: `python -m learner --replay DIR`."""

    passes: int = Field(default=1, ge=1)
    """How often the journal is gone through; `run.steps` ends it earlier."""
    rebatch: bool = False
    """Form new batches of `run.groups_per_step` groups, and filter; off: the batches of the run, as they were."""
    export: bool = False
    """Write the final weights into `run.dir/weights` as a published version."""


class BatchSettings(Settings):
    """How groups become micro-batches."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens, padding included, in one forward pass; a longer trajectory goes alone. GPUs like many more."""
    row_tokens: int = Field(default=0, ge=0)
    """Trajectories are packed into rows of this many tokens (or of the longest one); 0 = each has its own row."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted among all trajectories of the batch before advantages are computed, so
    that there is nothing to learn. The metrics still show the true rewards."""


class TrainerSettings(Settings):
    """All of the above: base class of the learner's section."""

    algorithm: AlgorithmSettings = GrpoSettings()
    """What is minimised."""
    batch: BatchSettings = BatchSettings()
    """How groups are packed."""
    optim: OptimSettings = OptimSettings()
    """How weights move."""
    model: ModelSettings = ModelSettings()
    """How the policy is computed."""
    critic: CriticSettings = CriticSettings()
    """What the policy's outcomes are held against, in algorithms that need values."""
    reference: ReferenceSettings = ReferenceSettings()
    """What the policy must not stray from, in algorithms with a divergence."""
    engine: DeepSpeedSettings = DeepSpeedSettings()
    """How it is distributed."""

    @model_validator(mode="after")
    def _bfloat16_needs_zero(self) -> TrainerSettings:
        # DeepSpeed's stage 0 silently takes an optimiser of another kind for bfloat16.
        if self.model.dtype == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError("model.dtype bfloat16 needs engine.zero_stage 1, 2 or 3")
        return self

    @model_validator(mode="after")
    def _distillation_needs_a_teacher(self) -> TrainerSettings:
        if self.algorithm.type == "distill" and self.reference.model is None:
            raise ValueError("algorithm distill needs a teacher: set reference.model to the directory of its model")
        return self


class FilesSettings(Settings):
    """What every transport needs to know of files: even one that sends weights writes them for those that missed it."""

    keep_versions: int = Field(default=4, ge=1)
    """Newest published versions that are kept, besides those that a live engine still reports."""
    fsync: bool = True
    """Flush weights to the device before they are announced. Off: a power cut may leave a torn version behind, which
    nodes refuse by its sha256; the next start publishes the checkpoint's weights again."""
    max_norm_jump: float = Field(default=4.0, ge=0)
    """Weights whose Euclidean norm, all tensors together, is more than this many times that of the version before, or
    less than that part of it, are not published, and the learner stops. No sane step does that; 0: never looked at."""


class DiskPublishSettings(FilesSettings):
    """Weights reach the engines as files on a path that learner and nodes share."""

    type: Literal["disk"] = "disk"
    """Transport."""


class DistributedPublishSettings(FilesSettings):
    """Weights are broadcast to the engines that are ready; files for all others.

    The learner's host holds one copy of the weights in main memory (as many bytes as the model in the learner's
    dtype), from which files are written for engines that missed a version, without a training step that waits.
    """

    type: Literal["distributed"] = "distributed"
    """Transport."""
    address: str = "127.0.0.1"
    """Address of this host by which the engines reach it; the ranks meet there alone. Who can connect could read the
    weights: keep it to loopback or a private network. On loopback gloo stays there too, else it takes the interface in
    GLOO_SOCKET_IFNAME, or that of the host's name."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port on which the ranks meet; 0 takes a free one for each new group."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """`gloo` sends from main memory, over sockets; `nccl` from GPU to GPU (not tried yet)."""
    bucket_mb: int = Field(default=256, ge=1)
    """Most MiB of one broadcast: one is sent while the next is gathered. A small model is cut finer."""
    flattened: bool = True
    """One broadcast for each bucket; off: one for each tensor."""
    prepare_s: float = Field(default=15.0, gt=0)
    """How long the engines may take to join the group and say so; who does not is left out for a minute."""
    transfer_s: float = Field(default=120.0, gt=0)
    """How long one version may take from its first byte to the checksums."""
    stall_s: float = Field(default=20.0, gt=0)
    """How long one bucket, or the last engine's checksum, may take: an engine that hangs must not hold up training."""
    patience_s: float = Field(default=5.0, ge=0)
    """An engine that serves and missed a version waits this long for the next one before files are written for it."""


class AdapterPublishSettings(FilesSettings):
    """Only a LoRA adapter reaches the engines, as files; they hold the run's initial model and never pause."""

    type: Literal["adapter"] = "adapter"
    """Transport."""
    alpha: float = Field(default=16.0, gt=0)
    """lora_alpha: the adapter's product is scaled by alpha / rank."""


PublishSettings = Annotated[
    DiskPublishSettings | DistributedPublishSettings | AdapterPublishSettings, Field(discriminator="type")
]
"""Union of the transports: a new one is one file and one member here."""


class LearnerSettings(TrainerSettings):
    """The whole section: what is computed (`TrainerSettings`), what is read, kept and written, and how often."""

    questions: Path = Path("questions.jsonl")
    """JSON lines of training questions: `question`, `answers` | `golden_answers` | `answer`, optionally `id`."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Steps between checkpoints. Redis holds the groups trained since the last one."""
    checkpoint_s: float = Field(default=600.0, gt=0)
    """A checkpoint is also due when the last one is this many seconds old."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept; the committed one always is."""
    on_stale: Literal["mask", "drop"] = "mask"
    """Group that began more than `run.max_lag` steps ago: mask its tokens beyond max_lag, or drop the whole group."""
    on_orphan: Literal["train", "mask"] = "train"
    """Tokens of a crashed predecessor's lost steps, replayed: train on them as on any within max_lag, or mask them."""
    reconcile_s: float = Field(default=10.0, gt=0)
    """How often seqs that are issued but found nowhere are looked for; missing twice in a row, they are reissued."""
    lease_s: float = Field(default=15.0, ge=0.3)
    """Lifetime of the learner's lease; renewed three times as often. A successor waits at most this long."""
    prefetch_steps: int = Field(default=2, ge=1)
    """Groups read ahead of training, in batches. The rest stay in Redis."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at a seq whose group arrives unreadable before it is settled as dead."""
    max_skipped: int = Field(default=3, ge=1)
    """Batches in a row with a loss or gradient that is not finite before the learner stops."""
    journal: bool = True
    """Keep every trained group in `run.dir/journal` for replay."""
    journal_max_gb: float = Field(default=0.0, ge=0)
    """The oldest files of a larger journal are dropped after a checkpoint, unless a resume needs them; 0: never. What
    is left can be replayed from the policy of that time only."""
    filter: FilterSettings = FilterSettings()
    """Groups that teach nothing."""
    replay_mix: MixSettings = MixSettings()
    """Groups that are trained again."""
    replay: ReplaySettings = ReplaySettings()
    """How `--replay DIR` goes through a journal."""
    metrics_port: int | None = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint `/metrics`; 0 takes a free one (`foray up` writes it to run.json, the learner to
    its log and its snapshot in Redis); null: no endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address that endpoint listens on. Any but loopback needs a token: FORAY_VIEWER_TOKEN (SECURITY.md)."""
    trackers: tuple[TrackerSettings, ...] = ()
    """Where the numbers of each step go besides `run.dir/metrics.jsonl`: [wandb], or [{type: wandb, project: mine}]."""
    publish: PublishSettings = DiskPublishSettings()
    """How new weights reach the engines: `publish.type` is disk (where nothing is said), distributed or adapter."""

    @property
    def journal_bytes(self) -> int:
        """Largest journal, 0 for any."""
        return int(self.journal_max_gb * 1e9)

    @property
    def filtering(self) -> FilterSettings:
        """`filter`, switched on by the algorithm where nothing is said: then the whole reward decides."""
        asked = self.algorithm.filter and not self.filter.metric
        return self.filter.model_copy(update={"metric": "reward"}) if asked else self.filter

    @model_validator(mode="after")
    def _mix_needs_a_journal(self) -> LearnerSettings:
        if self.replay_mix.share and not self.journal:
            raise ValueError("replay_mix.share needs journal: true, from which a resumed learner takes the groups")
        return self

    @model_validator(mode="after")
    def _adapters_agree(self) -> LearnerSettings:
        lora, publish = self.model.lora, self.publish
        if isinstance(publish, AdapterPublishSettings):
            if not lora.rank:
                raise ValueError(
                    "publish.type adapter needs model.lora.rank: without it there is no adapter to publish"
                )
            if publish.alpha != lora.alpha:
                raise ValueError(
                    f"publish.alpha {publish.alpha:g} and model.lora.alpha {lora.alpha:g} must be one number"
                )
        return self

    @field_validator("trackers", mode="before")
    @classmethod
    def _names_are_types(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"type": item} if isinstance(item, str) else item for item in value]

    @field_validator("publish", mode="before")
    @classmethod
    def _disk_unless_said(cls, value: Any) -> Any:
        return {"type": "disk", **value} if isinstance(value, dict) else value


def require_groups(run: RunSettings, settings: LearnerSettings) -> None:
    """Raise UserError where every advantage would be 0: groups of one, and a baseline that is the group's."""
    algorithm = settings.algorithm
    if run.group_size == 1 and algorithm.group_baseline:
        raise UserError(
            f"run.group_size = 1, and learner.algorithm.type {algorithm.type} compares a trajectory with its group",
            why="alone in its group every trajectory has advantage 0: the run would train on nothing",
            todo="run.group_size of 2 or more (8 is usual), or an algorithm without a group baseline: "
            "learner.algorithm.type ppo, reinforce or reinforce_pp (with baseline none)",
        )
