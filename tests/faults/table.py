"""The fault table: component, fault, reaction, and where users see it. Tests name its rows with
`@pytest.mark.fault(row, ...)`; `make reliability` runs them and writes the table into docs/faults.md.

R rollout server, L learner, E engine and its node, S retriever, Q Redis, D dashboards and trackers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One fault. `seen`: the metric, event or message that shows it; `lacking`: why no test can run here."""

    fault: str
    behaviour: str
    seen: str
    lacking: str = ""


ROWS: dict[int, Row] = {
    1: Row("R killed", "its tasks are taken over after `task_idle_ms`; no group is half published", "reclaimed"),
    2: Row("R SIGTERM", "leases nothing more, finishes or releases within `drain_s`, exit 0", "log: releasing"),
    3: Row("R suspended, then resumed", "its tasks are taken over; its late publish is refused as DUP", "duplicates"),
    4: Row(
        "R cut off from Q",
        "groups in flight continue up to a bound and are published after the reconnect",
        "spooled_groups, wait redis",
    ),
    5: Row("R cut off from E, or E dead", "the turn continues at another engine with the tokens received", "failovers"),
    6: Row("E slow", "a timeout per turn; a window bounds the requests in flight", "strikes, wait backlog"),
    7: Row(
        "L killed before a checkpoint",
        "a new epoch takes over the pending entries; no seq is trained twice",
        "redelivered",
    ),
    8: Row(
        "L killed between checkpoint and ack",
        "redelivered entries are in the ledger: they are only acknowledged",
        "duplicates",
    ),
    9: Row(
        "L killed while writing a checkpoint",
        "the unfinished one is ignored; the previous one is loaded",
        "log: resuming from",
    ),
    10: Row(
        "L SIGTERM",
        "finishes the step, writes a checkpoint, acknowledges, releases the lease, exit 143",
        "log: stopped at step",
    ),
    11: Row(
        "L suspended for longer than its lease", "a successor takes over; the suspended one exits 75", "event: fenced"
    ),
    12: Row("a rank of L dies", "the whole learner exits non-zero; no version is announced", "exit code"),
    13: Row(
        "two learners",
        "the second is refused and names the holder of the run; --takeover fences the first",
        "exit codes 2, 75",
    ),
    14: Row(
        "L cut off from Q",
        "trains the groups it has, waits, acquires the lease again under a higher epoch",
        "wait redis, event: epoch",
    ),
    15: Row(
        "L dies in the middle of a transfer",
        "an engine with changed weights is quarantined and never resumes half loaded",
        "views_failed",
    ),
    16: Row(
        "E dies in the middle of a transfer",
        "the version is published as files; the broadcast group is created again without it",
        "publish_fallbacks",
    ),
    17: Row(
        "E restarts with old weights", "gets no request before it has loaded and verified the target", "state SYNCING"
    ),
    18: Row(
        "E joins in the middle of a transfer", "not in the view; loads the last announced version", "publish_snapshots"
    ),
    19: Row(
        "E hangs with HTTP alive",
        "SUSPECT when a probe that must generate a token fails, then restarted",
        "hangs, restarts",
    ),
    20: Row("E answers 5xx or is out of memory", "strikes, smaller window, other engines", "strikes"),
    21: Row("E returns NaN, wrong lengths, nothing", "refused at R and generated elsewhere", "tokens_discarded"),
    22: Row("E of another tokenizer", "gets no request; both fingerprints are shown", "unroutable_reason"),
    23: Row("Q killed, with its file", "all processes reconnect; tasks of the lost second are reissued", "reissued"),
    24: Row(
        "Q killed, without a file",
        "streams and functions are created again; tasks are reissued from the ledger",
        "event: state-lost",
    ),
    25: Row(
        "Q at maxmemory",
        "publishing is refused before the task is acknowledged; leases are renewed; an L without groups writes a "
        "checkpoint and frees memory",
        "wait redis, log: Redis is full",
    ),
    26: Row("Q's disk full", "all processes wait and retry", "wait redis"),
    27: Row("Q fails over to a replica that lags", "as 23; the epoch cannot repeat", "event: epoch"),
    28: Row("Q stopped for seconds", "time-outs, no blocked event loop, nothing is sent twice", "wait redis"),
    29: Row("Q flushed by a user", "as 24; ACL users cannot", "event: state-lost"),
    30: Row("corrupt message", "dead letter with the bytes; the seq is reissued", "dead_letters, foray dlq"),
    31: Row("unknown schema version", "major: dead letter that asks for an upgrade; minor: read", "dead_letters"),
    32: Row("delivered or published twice", "DUP at publish, the ledger at consumption", "duplicates"),
    33: Row("delivered in another order", "batches by arrival; the ledger is a set", "-"),
    34: Row(
        "huge trajectory or group",
        "limits on turns, tokens and bytes at R; then failed with the reason",
        "groups_failed",
    ),
    35: Row(
        "a group that kills the learner", "dead letter by delivery count, before it is decoded", "dead letter: poison"
    ),
    36: Row("S 500, 429, silent", "retried within the turn, then observed, masked or dropped", "search_errors"),
    37: Row("S sends invalid answers", "schema, size and count are checked; else as 36", "search_errors"),
    38: Row("S returns tags of the protocol", "neutralised; mask and reward do not change", "-"),
    39: Row(
        "loss or gradient not finite",
        "the step is skipped on all ranks, its seqs are settled as dead; 3 in a row end the run",
        "skipped_steps",
    ),
    40: Row(
        "weights not finite, or their norm jumps", "not published; the last good version stays", "exit code, message"
    ),
    41: Row(
        "checkpoint's disk full",
        "the old one stays; training continues; after 3 failures no more tasks are issued",
        "event: checkpoint-failed",
    ),
    42: Row(
        "weights' disk full, or half a file",
        "renamed when complete; readers verify; no file in use is removed",
        "message",
    ),
    43: Row("weight file corrupted", "refused by its sha256, read again, then QUARANTINED", "state QUARANTINED"),
    44: Row("hosts' clocks differ", "no decision uses another host's clock", "foray doctor"),
    45: Row("Q's clock jumps", "early take-over gives DUP, early lease loss a new epoch", "duplicates"),
    46: Row("tracker or dashboard down", "training does not wait for them", "log"),
    47: Row("port taken", "the message names the holder and the fix", "exit code 2, foray doctor"),
    48: Row("rollouts faster than L", "credit limits the tasks; Q stays bounded", "wait credit"),
    49: Row("L faster than rollouts", "waits without spinning and without a timeout", "wait data"),
    50: Row("end of the run", "nothing is in flight, no process waits for a further version", "state done"),
    51: Row(
        "another run on the same Redis",
        "keys contain the run id; messages of another run are refused",
        "dead letter: foreign_run",
    ),
    52: Row("R upgraded before L", "both can read messages of another minor version", "-"),
    53: Row(
        "any process suspended for 5, 20 or 90 s",
        "its leases are taken over; when it goes on, no healthy engine is ejected and no group is lost",
        "reclaimed, failovers, event: epoch",
    ),
    54: Row(
        "R's event loop stands still for seconds",
        "the time is not blamed on engines or retrievers; lost leases are noticed before anything is settled",
        "event_loop_lag_s",
    ),
    55: Row(
        "the machine suspended, with Q and engines",
        "as 53: nobody was silent, and all leases are renewed",
        "event: epoch",
    ),
    56: Row("the wall clock of one process jumps", "intervals and leases are measured by monotonic clocks", "-"),
    57: Row(
        "a process has no free file descriptor",
        "R and S wait and retry, no healthy engine is ejected; L stops with the reason",
        "log: Too many open files",
    ),
    58: Row("Q away for 45 minutes", "every loop retries with bounded pauses; the same processes go on", "wait redis"),
    59: Row(
        "E out of reach for hours while its node reports READY",
        "it is tried once per pause of at most 10 s; the turn continues at another engine",
        "engine_errors, strikes",
    ),
    60: Row(
        "the disk full at any write of L",
        "L goes on or stops with the reason, and resumes without loss",
        "exit code, message",
    ),
    61: Row(
        "a second L while the first verifies its checkpoint for longer than its lease",
        "the first renews its lease; the second is refused",
        "exit code 2",
    ),
    62: Row(
        "ranks of L without a shared run directory", "refused at the start; no such checkpoint is committed", "message"
    ),
    63: Row(
        "a batch whose training ends L",
        "after three starts its groups become dead letters, and the run goes on",
        "dead letter: poison",
    ),
    64: Row("300 groups published at once", "all arrive, once; leases are renewed meanwhile", "duplicates"),
}
