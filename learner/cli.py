"""`python -m learner --config FILE [learner.checkpoint_every=5 ...]`: parse, then train.

Heavy imports follow after the settings are read, so that `--help` and errors in keys appear immediately.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from learner.config.learner import LearnerSettings, require_groups
from learner.trainer.distributed.worker import ranks, run_worker
from protocol.errors import Fenced, ForayError, UserError
from protocol.runtime.config import SettingsTree, section
from protocol.runtime.files import is_full
from protocol.runtime.log import LOG_FORMAT
from protocol.runtime.service_cli import add_config_arguments, run_service
from protocol.runtime.torch_safety import set_nccl_defaults
from protocol.settings import RunSettings


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m learner") -> int:
    """Run the learner and return the exit status.

    0 at the end of the run, 143 or 130 after SIGTERM or SIGINT (a checkpoint is written), 1 if the accounting is
    inconsistent or that checkpoint cannot be written, 2 for an error that you must fix, 65 without a training signal,
    75 if another learner took over.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train the policy on the trajectory groups that arrive in Redis, and publish its weights.",
        epilog="Run the same command again to resume from the last checkpoint. On several GPUs: "
        "torchrun --nproc-per-node N -m learner ..., or deepspeed --module learner ...",
    )
    add_config_arguments(parser, "YAML file; the sections `run` and `learner` are read", "learner.checkpoint_every=5")
    parser.add_argument("--takeover", action="store_true", help="take over the run from a learner that still holds it")
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="resume from a checkpoint that is not signed with the run's key (FORAY_RUN_KEY, or run.dir/run.key)",
    )
    parser.add_argument("--replay", type=Path, metavar="DIR", help="train from the journal of this run, without Redis")
    parser.add_argument("--rebatch", action="store_true", help="with --replay: form new batches of its groups")
    parser.add_argument("--passes", type=int, default=1, help="with --replay: passes over it (default: 1)")
    parser.add_argument("--export", action="store_true", help="with --replay: publish the final weights in run.dir")
    # added by the deepspeed launcher; the environment has the same value
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    rank, size = ranks()
    prefix = f"[rank {rank}] " if size > 1 else ""
    log_format = LOG_FORMAT.replace("%(name)s", f"{prefix}%(name)s")
    return run_service(parser, argv, partial(_serve, prefix=prefix), log_format=log_format, prefix=prefix)


def _serve(args: argparse.Namespace, tree: SettingsTree, *, prefix: str) -> int:
    try:
        return _train(args, tree)
    except UserError:
        raise
    except Fenced as error:
        print(prefix + fenced(error).render(), file=sys.stderr)
        return error.exit_code
    except ForayError as error:
        print(prefix + error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if not is_full(error):
            raise
        todo = "free disk space for run.dir and start again: nothing is lost"
        raise UserError(f"the disk is full: {error}", todo=todo) from None


def _train(args: argparse.Namespace, tree: SettingsTree) -> int:
    run = section(tree, "run", RunSettings)
    settings = section(tree, "learner", LearnerSettings)
    require_groups(run, settings)
    if settings.publish.type == "distributed" and settings.publish.backend == "nccl":
        set_nccl_defaults(os.environ)  # NCCL reads them once, for the learner's own groups too
    if ranks()[0]:
        return run_worker(run, settings)
    if args.replay is not None:
        from learner.checkpoint.replay import ReplayOptions, replay

        if args.passes < 1:
            raise UserError(f"--passes {args.passes} is less than 1", todo="give --passes 1 or more")
        how = ReplayOptions(args.passes, args.rebatch, args.export)
        return replay(run, settings, args.replay, how=how, trust_checkpoint=args.trust_checkpoint)
    run = run.with_redis(os.environ)
    from learner.main import serve

    return serve(run, settings, takeover=args.takeover, trust_checkpoint=args.trust_checkpoint)


def fenced(error: Fenced) -> UserError:
    """Return the error message of a learner that was replaced."""
    return UserError(
        f"fenced: {error}",
        why="its lease expired (the process was suspended, or could not reach Redis, for longer than learner.lease_s) "
        "or "
        "--takeover was used; since then it has written nothing that counts: no checkpoint, no weights that engines "
        "load, no acknowledgement",
        todo="nothing, if the other learner should train; otherwise stop that one and start this one again",
    )
