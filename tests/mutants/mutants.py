"""Known bugs to build into the product, each with the test files that must detect it.

`old` occurs in the file exactly once; it is replaced by `new`. `tests` are files or folders below tests/ that should
fail with the change, so that `make mutants` takes minutes and not days.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


LUA = "protocol/functions.lua"
OWN = "if not own(k[1], a[1], a[2]) then return FENCED end"
FUNCTIONS = ("protocol/test_functions.py", "simulation/test_sim_redis.py")
FORMULAS = ("learner/test_formulas.py", "learner/test_formulas_batch.py")

MUTANTS = (
    # delivery: functions of Redis
    Mutant("ack is not fenced", LUA, f"{OWN}\n  local n = 0", "local n = 0", FUNCTIONS),
    Mutant("view is not fenced", LUA, f"{OWN}\n  if a[5]", "if a[5]", FUNCTIONS),
    Mutant("a lease without its epoch", LUA, "call('HGET', lease, 'epoch') == epoch and ", "", FUNCTIONS),
    Mutant("a lease without its token", LUA, " and call('HGET', lease, 'token') == token", "", FUNCTIONS),
    Mutant(
        "a new epoch ignores the checkpoint's",
        LUA,
        "math.max(number_at(k[2]), tonumber(a[2])) + 1",
        "number_at(k[2]) + 1",
        FUNCTIONS,
    ),
    Mutant(
        "published although the task is not ours",
        LUA,
        "if not leased(k[1], a[1], a[6]) then return 'DUP' end\n  local id = call('XADD', k[2]",
        "local id = call('XADD', k[2]",
        FUNCTIONS,
    ),
    Mutant(
        "acknowledged before the group is added",
        LUA,
        "if not leased(k[1], a[1], a[6]) then return 'DUP' end\n  local id = call('XADD', k[2]",
        "if call('XACK', k[1], 'rollout', a[1]) == 0 then return 'DUP' end\n  local id = call('XADD', k[2]",
        FUNCTIONS,
    ),
    Mutant(
        "a forged task costs the true one an attempt",
        "learner/delivery/consumer.py",
        "if entry.seq in self._store.snapshot().tasks:",
        "if False:",
        ("learner/test_hostile_redis.py",),
    ),
    Mutant(
        "trimmed one entry too far",
        LUA,
        "if pending[2] then return pending[2] end",
        "if pending[3] then return pending[3] end",
        FUNCTIONS,
    ),
    Mutant("beats the tasks of others", LUA, "a[i], a[i], 1, a[1])", "a[i], a[i], 1)", FUNCTIONS),
    Mutant(
        "issues below the floor",
        LUA,
        "issued = math.max(issued, tonumber(a[3]))",
        "issued = issued",
        FUNCTIONS,
    ),
    # delivery: learner
    Mutant(
        "a settled seq is settled again",
        "protocol/ledger.py",
        "        if seq in self:\n            raise",
        "        if False:\n            raise",
        ("protocol/test_ledger.py",),
    ),
    Mutant(
        "a seq that is here is taken twice",
        "learner/delivery/consumer.py",
        "if seq in delivery.ledger or seq in delivery.pending:",
        "if seq in delivery.ledger:",
        ("learner/test_consumer.py", "learner/test_delivery_state.py"),
    ),
    Mutant(
        "a settled seq is trained again",
        "learner/delivery/consumer.py",
        "if seq in delivery.ledger or seq in delivery.pending:",
        "if seq in delivery.pending:",
        ("learner/test_consumer.py", "learner/test_delivery_state.py"),
    ),
    Mutant(
        "a checkpoint acknowledges everything",
        "learner/delivery/state.py",
        'decided = [id_ for name in state.get("entries", ()) if (id_ := name.encode()) in self.unacked]',
        "decided = list(self.unacked)",
        ("learner/test_delivery_state.py", "learner/test_loop.py"),
    ),
    Mutant(
        "acknowledged before the checkpoint",
        "learner/checkpointing.py",
        "        groups, state = self.decided, ctx.delivery.to_state() | ctx.audit.to_state()\n",
        "        groups, state = self.decided, ctx.delivery.to_state() | ctx.audit.to_state()\n"
        "        ctx.store.ack(ctx.delivery.mark_durable(state))\n",
        ("learner/test_loop.py", "learner/test_checkpoint.py", "learner/test_resume.py", "learner/test_durability.py"),
    ),
    Mutant(
        "a checkpoint acknowledges steps after its snapshot",
        "learner/checkpointing.py",
        "ctx.delivery.mark_durable(writing.state)",
        "ctx.delivery.mark_durable(ctx.delivery.to_state())",
        ("learner/test_async_checkpoint.py",),
    ),
    Mutant(
        "a checkpoint is committed before it is written",
        "learner/checkpointing.py",
        "                writing.result()\n                confirm",
        "                confirm",
        ("learner/test_async_checkpoint.py",),
    ),
    Mutant(
        "a snapshot of the live state",
        "learner/engine/state.py",
        ".resize_(tensor.shape).copy_(tensor)",
        ".set_(tensor)",
        ("learner/test_engine_state.py",),
    ),
    Mutant(
        "tokens at the bound are masked",
        "learner/data/batch.py",
        "lag(now_step, span.version) > max_lag",
        "lag(now_step, span.version) >= max_lag",
        ("learner/test_batch.py",),
    ),
    Mutant(
        "an orphan one step later",
        "protocol/versions.py",
        "version.step > start.step for start",
        "version.step >= start.step for start",
        ("protocol/test_versions.py",),
    ),
    Mutant(
        "an entry may kill once more",
        "learner/delivery/consumer.py",
        "- self._tries[id_] >= DELIVERIES:",
        "- self._tries[id_] > DELIVERIES:",
        ("learner/test_poison.py",),
    ),
    Mutant(
        "a group is stale one step early",
        "rollout_server/dispatch/runner.py",
        "target.step - first.step > self._max_lag",
        "target.step - first.step >= self._max_lag",
        ("rollout_server/test_tasks.py",),
    ),
    Mutant(
        "a lost lease goes on",
        "rollout_server/dispatch/leases.py",
        "                task.cancel()\n                await",
        "                await",
        ("rollout_server/test_tasks.py",),
    ),
    Mutant(
        "twice the credit",
        "protocol/staleness.py",
        "window = (max_lag + 1) * groups_per_step",
        "window = (max_lag + 2) * groups_per_step",
        ("learner/test_issue.py", "learner/test_delivery_state.py"),
    ),
    Mutant(
        "the cross-check says nothing",
        "learner/delivery/audit.py",
        "                return _problem(moved)\n",
        '                return ""\n',
        ("learner/test_redis_audit.py",),
    ),
    Mutant(
        "seqs that are settled are issued again",
        "learner/delivery/issuer.py",
        "if s not in delivery.ledger and s not in delivery.pending]",
        "if s not in delivery.pending]",
        ("learner/test_issue.py",),
    ),
    Mutant(
        "any count of issued tasks is believed",
        "learner/delivery/issuer.py",
        "        if issued <= most:",
        "        if True:",
        ("learner/test_issue.py",),
    ),
    # what is durable
    Mutant(
        "the journal rolls over without fsync",
        "learner/checkpoint/journal.py",
        "            self.flush()  # the next",
        "            pass  # the next",
        ("learner/test_durability.py",),
    ),
    Mutant(
        "checkpoint without fsync of its files",
        "learner/checkpoint/checkpoint.py",
        "            fsync_tree(part.path)\n",
        "",
        ("learner/test_checkpoint.py", "learner/test_durability.py"),
    ),
    Mutant(
        "checkpoint in spite of a newer epoch",
        "learner/checkpoint/checkpoint.py",
        "> epoch:\n            raise Fenced",
        "> epoch + 9:\n            raise Fenced",
        ("learner/test_checkpoint.py",),
    ),
    Mutant(
        "a manifest that was changed",
        "learner/checkpoint/signing.py",
        "if not hmac.compare_digest(",
        "if False and not hmac.compare_digest(",
        ("learner/test_checkpoint.py", "learner/test_trust.py"),
    ),
    Mutant(
        "an epoch is begun twice",
        "learner/delivery/lease.py",
        "return create_once(self.epochs_dir",
        "return True or create_once(self.epochs_dir",
        ("learner/test_lease.py",),
    ),
    Mutant(
        "a damaged frame of the journal is read",
        "learner/checkpoint/journal.py",
        "if len(raw) != location.length or isal_zlib.crc32(raw) != location.crc:",
        "if len(raw) != location.length:",
        ("learner/test_journal.py",),
    ),
    Mutant(
        "an index that is off by one",
        "learner/checkpoint/journal.py",
        "location.offset != end + FRAME.size or ",
        "location.offset < end + FRAME.size - 1 or ",
        ("learner/test_journal.py",),
    ),
    Mutant(
        "weights published without fsync",
        "learner/weights/disk.py",
        "                fsync_tree(part)",
        "                pass",
        ("learner/test_publish.py", "learner/test_durability.py"),
    ),
    # weights
    Mutant(
        "weights that are not finite are published",
        "learner/weights/checks.py",
        "if not math.isfinite(norm):",
        "if False:",
        ("learner/test_sanity.py", "learner/test_publish.py"),
    ),
    Mutant(
        "files of weights are not compared",
        "rollout_server/node/weights/manifest.py",
        "if digest.hexdigest() != sha256:",
        "if False:",
        ("rollout_server/test_node_manifest.py",),
    ),
    Mutant(
        "the version is not read back",
        "rollout_server/node/weights/follower.py",
        "            held = await client.version()\n            if held != update.version:\n"
        '                raise EngineError("bad_output", client.name, '
        'f"it reports version {held and held.label}, not {label}")\n'
        "            await client.resume()",
        "            await client.resume()",
        ("rollout_server/test_node.py",),
    ),
    Mutant(
        "what engines hold is not compared with what was sent",
        "learner/weights/transfer.py",
        "if answer.tensors_sha256 != self._sums.total(self._dtypes[member], answer.unused):",
        "if False:",
        ("learner/test_transfer.py",),
    ),
    Mutant(
        "what engines hold is not compared among them",
        "learner/weights/transfer.py",
        "if len(set(by_member.values())) > 1:",
        "if False:",
        ("learner/test_transfer.py",),
    ),
    # evaluation, and what is said of a run
    Mutant(
        "engines of every version serve an evaluation",
        "rollout_server/engine/router.py",
        "table.pinned(self._tokenizer, self._fleet.pin)",
        "table.pinned(self._tokenizer)",
        ("rollout_server/test_episodes.py",),
    ),
    Mutant(
        "an episode that mixes versions is passed on",
        "rollout_server/api/evaluation_pin.py",
        "set(labels) <= {self.version.label}",
        "True",
        ("rollout_server/test_episodes.py",),
    ),
    Mutant(
        "an evaluation may hold up training for ever",
        "rollout_server/api/evaluation_pin.py",
        "self._left_s() <= 0",
        "False",
        ("rollout_server/test_episodes.py",),
    ),
    Mutant(
        "evaluations in a row hold up training for ever",
        "rollout_server/api/evaluation_pin.py",
        "self._left_s() < self._max_s / 2",
        "False",
        ("rollout_server/test_pin.py",),
    ),
    Mutant(
        "a wait of the learner is booked at its end",
        "learner/observability/metrics.py",
        "return {cause: total + going_on.get(cause, 0.0) for cause, total in self._waits.items()}",
        "return dict(self._waits)",
        ("deploy/test_top.py",),
    ),
    # trajectories
    Mutant(
        "tokens of the environment are trained",
        "protocol/messages.py",
        "np.full(len(s.ids), s.owner is Owner.POLICY)",
        "np.full(len(s.ids), s.owner is not Owner.PROMPT)",
        ("learner/test_batch.py", "protocol/test_codec.py", "rollout_server/test_rollout.py"),
    ),
    Mutant(
        "spans with a gap",
        "protocol/messages.py",
        "if span.start != position or",
        "if span.start < position or",
        ("protocol/test_codec.py",),
    ),
    Mutant(
        "closing tags are not escaped",
        "rollout_server/environment/actions.py",
        r"(?:/\s*)?(?:{",
        r"(?:{",
        ("rollout_server/test_actions.py",),
    ),
    Mutant(
        "tags of tools are not escaped",
        "rollout_server/environment/actions.py",
        "(*RESERVED_TAGS, *tools)",
        "RESERVED_TAGS",
        ("rollout_server/test_actions.py", "rollout_server/test_tools.py"),
    ),
    Mutant(
        "passages are not escaped",
        "rollout_server/environment/actions.py",
        "return escape_tags(template.format_passages(passages)[: max_tokens * MAX_CHARS_PER_TOKEN], tools)",
        "return template.format_passages(passages)[: max_tokens * MAX_CHARS_PER_TOKEN]",
        ("rollout_server/search/test_injection.py", "rollout_server/test_rollout.py"),
    ),
    Mutant(
        "invisible characters hide a tag",
        "rollout_server/environment/actions.py",
        "for reading in _READINGS)",
        "for reading in _READINGS[:1])",
        ("rollout_server/test_actions.py",),
    ),
    Mutant(
        "observations are encoded in three pieces",
        "rollout_server/environment/environment.py",
        "if short and len(ids := encode(whole)) <= limit:",
        "if short and len(ids := [*self.before, *encode(text), *self.after]) <= limit:",
        ("rollout_server/test_observations.py",),
    ),
    Mutant(
        "tasks forget top_p",
        "learner/delivery/issuer.py",
        "top_p=self._run.top_p",
        "top_p=1.0",
        ("learner/test_issue.py",),
    ),
    Mutant(
        "passages may hold control tokens",
        "rollout_server/environment/tokenizer.py",
        "return [i for i in ids if i not in self.control_ids]",
        "return list(ids)",
        ("rollout_server/test_tokens.py",),
    ),
    Mutant(
        "exact match keeps articles",
        "rollout_server/rewards/text_match.py",
        '_ARTICLE.sub(" ", text.lower()',
        "(text.lower()",
        ("rollout_server/test_reward_exact.py",),
    ),
    # engines
    Mutant(
        "a window never shrinks",
        "rollout_server/engine/admission.py",
        "SHRINK = 0.7",
        "SHRINK = 1.0",
        ("rollout_server/test_choose.py", "rollout_server/test_router.py"),
    ),
    Mutant(
        "a window shrinks to nine tenths",
        "rollout_server/engine/admission.py",
        "SHRINK = 0.7",
        "SHRINK = 0.9",
        ("rollout_server/test_choose.py", "rollout_server/test_router.py"),
    ),
    Mutant(
        "a group has no engine",
        "rollout_server/engine/selection.py",
        'next(filter(None, usual), "")',
        'usual[0] if usual else ""',
        ("rollout_server/test_choose.py", "rollout_server/test_router.py"),
    ),
    # who may call what
    Mutant(
        "anybody may read the metrics",
        "protocol/runtime/http/auth.py",
        'OPEN = frozenset({"/health", "/ready"})',
        'OPEN = frozenset({"/health", "/ready", "/metrics"})',
        ("security/test_access.py", "security/test_http_access.py"),
    ),
    Mutant(
        "nodes may ask for episodes",
        "rollout_server/api/app.py",
        '    "/v1/episodes": "operator",',
        '    "/v1/episodes": "node",',
        ("security/test_access.py", "security/test_http_access.py"),
    ),
    Mutant(
        "viewers may search",
        "retriever/api/app.py",
        'ROUTE_ROLES, default="node"',
        'ROUTE_ROLES, default="viewer"',
        ("security/test_access.py", "security/test_http_access.py"),
    ),
    Mutant(
        "control routes take the API key",
        "rollout_server/cpu_engine/server/app.py",
        'for route in control if route.method == "POST"',
        'for route in control if route.method == "PUT"',
        ("contracts/engine/test_engine_keys.py",),
    ),
    Mutant(
        "any name leads to a loopback service",
        "protocol/runtime/http/auth.py",
        "return not header or _is_loopback_url(",
        "return True or _is_loopback_url(",
        ("security/test_access.py", "security/test_http_access.py"),
    ),
    Mutant(
        "bodies are inflated",
        "protocol/runtime/http/server.py",
        '"auto_decompress": False',
        '"auto_decompress": True',
        ("security/test_http_bodies.py",),
    ),
    Mutant(
        "other origins may use an open service",
        "protocol/runtime/http/auth.py",
        "and (not origin or _is_loopback_url(origin))",
        "and True",
        ("security/test_http_origin.py", "security/test_http_access.py"),
    ),
    Mutant(
        "secrets are shown",
        "protocol/redaction.py",
        "        text = text.replace(secret, SHOWN)",
        "        pass",
        ("security/test_redaction.py",),
    ),
    Mutant(
        "a sandbox with the host's network",
        "rollout_server/tools/sandbox/bubblewrap.py",
        '"--unshare-all", "--unshare-user"',
        '"--unshare-all", "--share-net", "--unshare-user"',
        ("rollout_server/test_sandbox.py",),
    ),
    Mutant(
        "as many processes as a program likes",
        "rollout_server/tools/sandbox/program.py",
        "(resource.RLIMIT_NPROC, threads + 1, threads + 1),",
        "",
        ("rollout_server/test_sandbox.py",),
    ),
    # retriever
    Mutant(
        "one hit less",
        "retriever/backends/index.py",
        "rows[:k]",
        "rows[:k - 1]",
        ("contracts/test_dialects.py", "retriever/test_app.py"),
    ),
    Mutant(
        "the cache ignores the number of hits",
        "retriever/serving/service.py",
        "Key(normalise(query), k, self._fingerprint)",
        "Key(normalise(query), 0 * k, self._fingerprint)",
        ("retriever/test_app.py", "retriever/test_cache.py"),
    ),
    # mathematics
    Mutant(
        "TIS without its cap",
        "learner/algorithms/losses/off_policy.py",
        ".exp().clamp(low, high), mask)",
        ".exp().clamp(low), mask)",
        ("learner/test_losses_offpolicy.py", "learner/test_grpo.py"),
    ),
    Mutant(
        "mask acts as truncate",
        "learner/algorithms/correction.py",
        'limit = truncated if s.mode == "truncate" else masked',
        "limit = truncated",
        ("learner/test_grpo.py",),
    ),
    Mutant(
        "weights are never normalised",
        "learner/algorithms/correction.py",
        "weight = normalised(weight, mask, self._sums)",
        "pass",
        ("learner/test_grpo.py",),
    ),
    Mutant(
        "TIS at twenty",
        "learner/config/policy.py",
        'high: float = Field(default=2.0, gt=0)\n    """Maximum weight."""',
        'high: float = Field(default=20.0, gt=0)\n    """Maximum weight."""',
        ("learner/test_grpo.py",),
    ),
    Mutant(
        "k2 without its half",
        "learner/algorithms/kl/estimators.py",
        "return 0.5 * x.square()",
        "return x.square()",
        ("learner/test_kl.py",),
    ),
    Mutant(
        "no dual clip by default",
        "learner/config/policy.py",
        "dual_clip: float = Field(default=3.0, ge=0)",
        "dual_clip: float = Field(default=0.0, ge=0)",
        ("learner/test_grpo.py", "learner/test_numerical_risks.py"),
    ),
    Mutant(
        "k3 without its cap",
        "learner/algorithms/kl/estimators.py",
        'if kind == "k3":\n        return capped(_k3(x))',
        'if kind == "k3":\n        return _k3(x)',
        ("learner/test_kl.py",),
    ),
    Mutant(
        "every end of a trajectory is bootstrapped",
        "learner/data/batch.py",
        "algorithm.bootstraps and trajectory.status is Status.TRUNCATED",
        "algorithm.bootstraps",
        ("learner/test_bootstrap.py",),
    ),
    Mutant(
        "logits are rounded to bfloat16",
        "learner/model/policy.py",
        "head.fp32 = settings.fp32_lm_head",
        "head.fp32 = False",
        ("learner/test_model.py",),
    ),
    Mutant(
        "a gold answer inside a word",
        "rollout_server/rewards/text_match.py",
        "return (character.isalnum() or _mark(character)) and not _UNSPACED.match(character)",
        "return False",
        ("rollout_server/test_reward_exact.py",),
    ),
    Mutant(
        "deviation of the population by default",
        "learner/algorithms/advantages/group.py",
        'std: Spread = "group", ddof: int = 1',
        'std: Spread = "group", ddof: int = 0',
        ("learner/test_advantages.py",),
    ),
    Mutant(
        "deviation of the population",
        "learner/algorithms/grpo.py",
        "STD_DDOF = 1",
        "STD_DDOF = 0",
        ("learner/test_grpo.py", "learner/test_advantages_family.py", "contracts/test_algorithm.py"),
    ),
    Mutant(
        "another upper clip",
        "learner/config/policy.py",
        "clip_high: float = Field(default=0.28, ge=0)",
        "clip_high: float = Field(default=0.2, ge=0)",
        ("learner/test_grpo.py", "learner/test_losses_policy.py", "deploy/test_presets.py"),
    ),
    # formulas: what spans a batch, and trust regions
    *(
        Mutant(f"formula: {name}", f"learner/algorithms/{path}", old, new, tests)
        for name, path, old, new, tests in (
            ("IPO keeps by sign", "losses/trust_region.py", "    if not symmetric:\n", "    if True:\n", FORMULAS),
            ("DPPO's bounds swapped", "losses/trust_region.py", "(size > low), mask", "(size > high), mask", FORMULAS),
            ("M2PO by rank", "losses/second_moment.py", "both = all_reduce(torch", "both = (torch", FORMULAS),
            ("M2PO at its edge", "losses/second_moment.py", "(last_in + first_out) / 2", "last_in", FORMULAS),
            ("one criterion", "correction.py", "for c in (r, *r.also):", "for c in (r,):", FORMULAS),
            (
                "mean as sum",
                "losses/off_policy.py",
                '    if level == "mean":\n        return segment_mean',
                '    if level == "mean":\n        return segment_sum',
                FORMULAS,
            ),
            ("mean over tokens", "losses/off_policy.py", '    if level != "token":\n', "    if False:\n", FORMULAS),
            ("parts unweighted", "grpo.py", "weight * self._compared", "self._compared", FORMULAS),
            ("alpha of all", "advantages/group.py", "/ max(counted, 1)", "/ max(len(outcomes.valid), 1)", FORMULAS),
            ("a student without bounds", "distill.py", "mask & ~(below | above)", "mask", FORMULAS),
            (
                "drift of what is kept",
                "policy.py",
                "weighted_sum(drift, inputs",
                "weighted_sum(drift * corrected.kept, inputs",
                FORMULAS,
            ),
        )
    ),
)
