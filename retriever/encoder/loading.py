"""A model and its tokenizer from a folder: device and number type chosen, nothing missing, nothing downloaded.

transformers only warns where weights are missing, and fills them with random numbers: a DPR context encoder that is
loaded as a question encoder "works", with random vectors. Here that is refused. Code that comes with a model is never
run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from protocol.errors import UserError
from protocol.safe_weights import refuse_pickled
from retriever.config_encoder import Compute

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_WIDE = ("t5", "mt5", "umt5")
"""Trained in bfloat16, with activations that float16 has no numbers for."""


def choose_device(asked: str) -> torch.device:
    """`auto` is a GPU where there is one. UserError for a device that this machine or this torch does not have."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"there is no device {asked!r} here",
            why=str(error).splitlines()[0],
            todo="set device to auto, cpu or cuda:0",
        ) from None
    return device


def choose_dtype(asked: str, device: torch.device, config: Any) -> torch.dtype:
    """`auto` is float32 on a CPU. On a GPU float16, whose vectors are eight times finer than bfloat16's, except for
    models that were trained in bfloat16: they may overflow in float16."""
    if asked != "auto":
        return DTYPES[asked]
    if device.type != "cuda":
        return torch.float32
    wide = config.model_type in _WIDE or getattr(config, "dtype", None) in (torch.bfloat16, "bfloat16")
    return torch.bfloat16 if wide else torch.float16


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer."""
    with _said_in_words(folder, "tokenizer"), quiet():
        return transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def load_model(folder: Path, compute: Compute, kind: str | None = None, unused: tuple[str, ...] = ()) -> Any:
    """The folder's model in evaluation mode, on its device.

    kind    class of transformers, e.g. AutoModelForSequenceClassification; None: what the folder says it is
    unused  parts of parameter names that may be missing since nothing reads them
    """
    if compute.threads:
        torch.set_num_threads(compute.threads)
    device = choose_device(compute.device)
    with _said_in_words(folder, "model"), quiet():
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        chosen = getattr(transformers, kind or _class_of(config))
        dtype = choose_dtype(compute.dtype, device, config)
        refuse_pickled(folder)
        model, told = chosen.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, use_safetensors=True, **_LOCAL
        )
    missing = [name for name in told["missing_keys"] if not any(part in name for part in unused)]
    missing += [str(entry[0]) for entry in told["mismatched_keys"]]
    if missing:
        raise UserError(
            f"the weights in {folder} are not those of a {type(model).__name__}",
            why=f"{len(missing)} tensors are missing or of another shape, e.g. {sorted(missing)[0]}",
            todo="give the folder of the right model",
        )
    log.info("%s from %s on %s in %s", type(model).__name__, folder.name, device, str(dtype).removeprefix("torch."))
    # decoders would keep keys and values that nobody reads
    model.config.use_cache = False
    return model.to(device).eval()


def _class_of(config: Any) -> str:
    """AutoModel, except where that takes the wrong half: of DPR's two encoders, and of T5."""
    named = (config.architectures or [""])[0]
    if named.startswith("DPR") and named.endswith("Encoder"):
        return str(named)
    return "AutoModelForTextEncoding" if config.model_type in _WIDE else "AutoModel"


@contextmanager
def _said_in_words(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"cannot load the {what} in {folder}",
            why=" ".join(str(error).split())[:300] or type(error).__name__,
            todo="the folder must hold config.json, a tokenizer and weights that this version of transformers knows",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no load report while the block runs: what matters in it is checked here."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
