"""Every metric of the learner with its description (`docs/metrics.md`).

STEP are the measurements of a step: a line of `metrics.jsonl`, a record of the trackers, the line on the console. RUN
are the further values in snapshots and on `/metrics`: totals of the run, and current values.
"""

from __future__ import annotations

from protocol.runtime.metrics import COUNTS, SECONDS, Table, counter, gauge, histogram

WAITS = counter("Seconds of the training thread, by activity or wait.", "cause", name="seconds")

STEP: Table = {
    # rollouts of the step
    "reward_mean": gauge("Mean reward of the step's valid trajectories."),
    "reward_std": gauge("Standard deviation (of the population) of those rewards."),
    "reward/*": gauge(
        "Mean of one part of the reward, before weighting, over the valid trajectories that have it.",
        "part",
        name="reward_part_mean",
    ),
    "source_groups/*": gauge("Groups of the step whose question is of this data set.", "source"),
    "source_reward/*": gauge(
        "Mean reward of the step's valid trajectories whose question is of this data set.",
        "source",
        name="source_reward_mean",
    ),
    "source_reward_part/*": gauge(
        "Mean of one part of the reward, before weighting, over the valid trajectories of this data set that have it.",
        "source",
        "part",
        name="source_reward_part_mean",
    ),
    "status/*": gauge(
        "Share of the step's trajectories with this status: answered, out_of_turns and truncated are valid, stale and "
        "failed are not.",
        "status",
        name="trajectory_share",
    ),
    "response_length_mean": gauge("Mean number of tokens that the policy sampled in a trajectory."),
    "response_length_max": gauge("Largest number of tokens that the policy sampled in a trajectory."),
    "trajectory_length_mean": gauge("Mean number of tokens of a whole trajectory, prompt and observations included."),
    "trajectory_length_max": gauge("Largest number of tokens of a whole trajectory."),
    "turns_mean": gauge("Mean number of turns that the policy wrote in a trajectory."),
    "turns_max": gauge("Largest number of turns in a trajectory."),
    "searches_mean": gauge("Mean number of searches in a trajectory."),
    "searches_max": gauge("Largest number of searches in a trajectory."),
    "turns_repeated": gauge("Share of the policy's turns that are equal to an earlier one of their trajectory."),
    "thoughts_empty": gauge("Share of thoughts (a turn's text up to </think>) without text, in a sample."),
    "thoughts_repeated": gauge("Share of thoughts that repeat an earlier one of their trajectory, in a sample."),
    "tool_errors_mean": gauge("Mean number of failed searches and tool calls in a trajectory."),
    "invalid_actions_mean": gauge("Mean number of turns in a trajectory without a search, a tool call or an answer."),
    "group_lag_mean": gauge("Mean lag of a group: steps between its oldest version and the policy before the update."),
    "group_lag_max": gauge("Largest lag of a group in steps."),
    "tokens_generated": gauge("Tokens that the policy sampled in the step's groups."),
    "groups_per_s": gauge("Groups trained per second of the step."),
    "trajectories_per_s": gauge("Trajectories of the trained groups per second of the step."),
    "tokens_generated_per_s": gauge(
        "Tokens that arrived from the rollout servers since the last step, per second of the step."
    ),
    "settled": gauge("Seqs that are settled."),
    "dead": gauge("Seqs settled as dead, minus those reopened: their questions failed."),
    "devices": gauge(
        "Ranks of the learner and of all engines that were registered when the step was published: its GPUs, or its "
        "processes that compute on CPUs."
    ),
    # the batch
    "trajectories": gauge("Trajectories in the batch, including mixed-in groups."),
    "trajectories_trained": gauge("Trajectories with at least one trained token."),
    "sequences_trained": gauge("Training sequences with at least one trained token: at least one a trajectory."),
    "zero_advantage_share": gauge(
        "Share of trajectories whose advantage is 0 in every turn: they give no learning signal."
    ),
    "tokens_sampled": gauge("Tokens that the policy sampled in the batch, including mixed-in groups."),
    "tokens_trained": gauge("Tokens with a gradient."),
    "tokens_stale": gauge("Sampled tokens masked because they are older than max_lag."),
    "tokens_orphan": gauge("Sampled tokens masked because their version belongs to steps that a crash rolled back."),
    "tokens_invalid": gauge("Sampled tokens of invalid trajectories."),
    "tokens_read": gauge("Tokens that the model read, including observations, excluding padding."),
    "tokens_shared": gauge("Prompt tokens that were not read again, because trajectories share them."),
    "padding_share": gauge("Share of the packed rows that is padding."),
    "micro_batches": gauge("Forward passes of the batch, over all ranks."),
    "rank_balance": gauge(
        "Mean compute of the ranks as a share of the busiest rank's, from tokens and lengths: 1 - share of idle time."
    ),
    "replayed_groups": gauge("Groups of earlier steps that were mixed in."),
    "lag_mean": gauge("Mean lag of the trained tokens: steps between the version that sampled them and the policy."),
    "lag_max": gauge("Largest lag of a trained token in steps."),
    # the update
    "loss": gauge("Loss of the batch before the update, of the last epoch."),
    "grad_norm": gauge("Norm of the gradient before clipping."),
    "lr": gauge("Learning rate of the last update."),
    "entropy": gauge("Mean entropy of the policy in nats per token."),
    "clip_fraction": gauge("Share of tokens whose ratio was clipped."),
    "clip_low": gauge("Share of tokens clipped at the lower bound."),
    "clip_high": gauge("Share of tokens clipped at the upper bound."),
    "clip_dual": gauge("Share of tokens clipped by the dual clip; dppo: those whose ratio is at ratio_cap."),
    "ratio_mean": gauge("Mean ratio of the policy to the proximal policy of the surrogate."),
    "ratio_max": gauge("Largest of those ratios."),
    "ess": gauge("Effective sample size of the ratios as a share of the tokens, (sum w)^2 / (n sum w^2)."),
    "weight_mean": gauge("Mean importance weight that corrects for the engines' log-probs."),
    "preserve": gauge(
        "Mean over tokens of the penalty on fallen log-probs, before its coefficient (algorithm.preserve)."
    ),
    "preserve_share": gauge("Share of tokens with that penalty."),
    "rejected": gauge("Share of tokens rejected from the loss."),
    "kl_behaviour": gauge("Divergence (k3) of the learner's policy from the engines' at the sampled tokens."),
    "kl_reference": gauge("Divergence from the reference policy, by the configured estimator."),
    "kl_coefficient": gauge("Coefficient of the divergence if it is part of the reward."),
    "logprob_gap": gauge("Mean absolute difference of the learner's and the engines' log-probs."),
    "logprob_gap_max": gauge("Largest absolute difference of the learner's and the engines' log-probs."),
    "logprob_right": gauge("Mean log-prob of tokens in trajectories with a positive advantage."),
    "logprob_wrong": gauge("Mean log-prob of tokens in trajectories with a negative advantage."),
    "logprob_right_turn_*": gauge("Mean of logprob_right by turn, from 0; the last one includes later ones.", "turn"),
    "logprob_change": gauge("Mean change over the step of log-probs in a sample of trajectories as logprob_right."),
    "logprob_change_turn_*": gauge("The same by turn.", "turn"),
    "fell_trajectories": gauge("Share of those trajectories whose log-prob fell by more than 1e-4 nats per token."),
    "fell_turns": gauge("Share of their turns whose log-prob fell by more than 1e-4 nats per token."),
    "entropy_answer": gauge("Mean entropy in the last turn of answered trajectories, in nats per token."),
    "entropy_search": gauge("Mean entropy in all other turns, in nats per token."),
    "ratio_low": gauge("Share of tokens whose ratio is below 0.5."),
    "ratio_high": gauge("Share of tokens whose ratio is above 2."),
    "loss_lag_*": gauge("Mean loss of the tokens with this lag; the last lag includes all older ones.", "lag"),
    # the critic
    "critic_lr": gauge("Learning rate of the critic's last update."),
    "critic_grad_norm": gauge("Norm of the critic's gradient before clipping."),
    "critic_skipped": gauge("Whether the critic's last update was skipped as non-finite (1) or not (0)."),
    "value_loss": gauge("Mean loss of the critic over the trained tokens."),
    "value_clip_fraction": gauge("Share of tokens whose value was clipped."),
    "value_mean": gauge("Mean value that the critic gave the trained tokens."),
    "return_mean": gauge("Mean return that the critic is trained on."),
    "explained_variance": gauge("Share of the variance of returns that the critic explains, 1 - var(R - V) / var(R)."),
    # weights, filter and time
    "publish_*_s": gauge("Seconds of one phase of the last publication of weights.", "phase", name="publish_seconds"),
    "publish_bytes": gauge("Bytes of the last version that was published."),
    "publish_members": gauge("Engines that received the last broadcast."),
    "publish_distributed": counter("Versions that were broadcast."),
    "publish_disk": counter("Versions that went to all engines as files although broadcast is configured."),
    "publish_fallbacks": counter("Broadcasts that failed, after which files were written."),
    "publish_again": counter("Broadcasts of the announced version to engines whose hosts do not have its files."),
    "publish_snapshots": counter("Versions also written as files for engines that missed the broadcast."),
    "groups_filtered_*": counter("Groups skipped by the filter, by reason.", "reason"),
    "step": gauge("Steps that the learner has done."),
    "epoch": gauge("Number of the learner start: a step of a higher epoch replaces that of a lower one."),
    "step_s": gauge("Seconds of the step, from the end of the previous one."),
    "seconds/*": gauge(
        "Seconds of the step by cause: wait (for rollouts), compute, publish, checkpoint, redis, validation.", "cause"
    ),
    "time_s": gauge("Seconds since this learner started."),
}

RUN: Table = {
    "trained": counter("Seqs settled as trained."),
    "filtered": counter(
        "Seqs settled as filtered: all rewards of the group are equal, or it was left over at the end."
    ),
    "stale": gauge("Seqs settled as stale, minus those reopened."),
    "steps": gauge("Total number of steps of the run."),
    "groups_trained": counter("Groups that were trained."),
    "tokens_trained": counter("Tokens with a gradient in the groups that were trained."),
    "tokens_sampled": counter("Tokens that the policy sampled in the groups that were trained."),
    "tokens_trained_per_s": gauge("Tokens with a gradient per second, over the last 30 seconds."),
    "groups_trained_per_s": gauge("Groups trained per second, over the last 30 seconds."),
    "issued": gauge("Highest seq that was issued."),
    "watermark": gauge("Highest seq up to which all seqs are settled."),
    "in_flight": gauge("Seqs that are issued and not settled."),
    "wanted_engines": gauge("Engines that the run can use now (docs/clusters.md).", name="foray_wanted_engines"),
    "held": gauge("Groups that have arrived and are waiting for training."),
    "duplicates": counter("Entries whose seq had already arrived or was settled."),
    "redelivered": counter("Entries that were read again or taken over."),
    "reissued": counter("Tasks that were reissued."),
    "dead_letters": counter("Entries that could not be used and became dead letters."),
    "poisoned": counter("Dead letters that were not decoded, because the learner crashed each time it read them."),
    "requeued": counter("Seqs reopened by `foray dlq requeue`."),
    "skipped_steps": counter("Batches skipped because a value was not finite."),
    "state_lost": counter("Times that Redis lost streams or functions of the run."),
    "lease_lapsed": counter("Times that the learner's lease expired."),
    "tokens_generated_total": counter("Tokens of all entries that arrived.", name="tokens_arrived"),
    "token_accounting_*": counter("Tokens that arrived, by outcome.", "outcome", name="tokens_by_outcome"),
    "token_accounting_in_flight": gauge("Tokens of groups that have arrived and are not settled."),
    "token_accounting_redis_lost": gauge("Published tokens that Redis lost before the learner read them."),
    "token_accounting_consistent": gauge("Whether every token that arrived is accounted for (1) or not (0)."),
    "accounting_consistent": gauge("Whether every seq and token is accounted for (1) or not (0)."),
    "checkpoint_step": gauge("Step of the last checkpoint."),
    "checkpoint_every": gauge("Steps between two checkpoints."),
    "checkpoint_failures": gauge("Consecutive checkpoints that could not be written."),
    "validation/*": gauge(
        "Means of the last validation: em, f1, cover_em, reward, searches, turns and tokens_generated per question, "
        "em_stderr (standard error), questions, failed. Trackers get them too.",
        "suite",
        "metric",
        name="validation",
    ),
    "validation_step": gauge("Step of the policy in the last validation."),
    "trace_spans_exported": counter("Spans of traces that were exported (run.trace)."),
    "trace_spans_dropped": counter("Spans of traces that were dropped: the collector is away or too slow."),
    "group_lag_steps": histogram("Lag of the trained groups in steps, by their oldest version.", COUNTS),
    "token_lag_steps": histogram("Lag in steps of the tokens that the policy sampled in the trained groups.", COUNTS),
    "group_queue_age_seconds": histogram(
        "Seconds from the publication of a group (Redis' clock) to its training (this host's).", SECONDS
    ),
}

OF_STEPS = frozenset({"tokens_generated", "seconds/*", "time_s"})
"""Not in the learner's snapshots, which have totals of the run or the rollout servers' values instead."""
LEARNER: Table = {name: row for name, row in STEP.items() if name not in OF_STEPS} | RUN
"""Metrics of a snapshot; for a name in both tables, snapshots have the run's total."""
