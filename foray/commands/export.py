"""Write the policy of a checkpoint as a Hugging Face model: weights, configuration, tokenizer.

`foray export runs/x OUT` uses the newest committed checkpoint, `foray export runs/x/checkpoints/step_50.e1 OUT` that
one. LoRA adapters are merged into the weights, or with --adapter written separately in PEFT's layout.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploy.run.run_dir import model_settings
from protocol.errors import UserError
from protocol.runtime.lifecycle import Terminated
from protocol.runtime.progress import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray export`."""
    parser.add_argument("where", type=Path, help="run directory, or one of its checkpoints")
    parser.add_argument("out", type=Path, help="directory to create")
    parser.add_argument("--ema", action="store_true", help="write the moving average instead of the policy")
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapters, in PEFT's layout")
    parser.add_argument("--config", type=Path, help="configuration of a run that has none (`foray up` saves it)")
    parser.add_argument("--model", type=Path, help="the model that the run started from (default: run.model)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype of the weights (default: the run's)")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the directory is written. Raises UserError for what the user must correct."""
    model, settings = model_settings(args.where, args.config)
    model = args.model or model
    if model is None:
        raise UserError(
            f"cannot find the configuration of {args.where}",
            why="its run directory has no resolved.yaml (`foray up` writes it)",
            todo="give --config FILE, or at least --model DIR if learner.model has default settings",
        )
    if not (model / "config.json").is_file():
        raise UserError(
            f"the model that the run started from is not at {model}",
            why="frozen weights, configuration and tokenizer are copied from it",
            todo="give its present directory with --model DIR",
        )
    if args.dtype:
        settings = settings.model_copy(update={"dtype": args.dtype})
    from learner.model.export import export_adapter, export_model, find_state

    export = export_adapter if args.adapter else export_model
    progress = Progress.on(sys.stderr)
    try:
        state = find_state(args.where, progress)
        export(state, model, settings, args.out, average=args.ema, progress=progress)
    except (KeyboardInterrupt, Terminated):
        progress(f"stopped; nothing was written; again: {args.again}")
        raise
    if not args.adapter:
        from learner.model.tokenizer_check import TEXTS, different_texts

        if (differ := different_texts(args.out)) is not None:
            progress(f"AutoTokenizer gives the ids of tokenizer.json for {TEXTS - differ} of {TEXTS} texts")
    print(args.out)
    return 0
