"""Settings and command line of the engine. Does not import torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from datetime import date as Date
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import Field

from protocol.errors import UserError
from protocol.runtime.config import descriptions
from protocol.runtime.http.auth import is_loopback
from protocol.runtime.number_format import DtypeSetting
from protocol.settings import Settings


class SchedulerSettings(Settings):
    """What `engine.kind` and the command line share."""

    threads: int = Field(default=1, ge=1)
    """Number of compute threads."""
    max_running: int = Field(default=64, ge=1, le=4096)
    """Maximum number of requests decoded together. Others are queued."""
    max_total_tokens: int = Field(default=65536, ge=256)
    """KV cache size in tokens, for running requests and cached prefixes."""
    dtype: DtypeSetting = "auto"
    """dtype of weights and KV cache; logits and log-probs are always float32. auto: that of the run's learner; by
    itself bfloat16 where the CPU is faster in it and the model has 10 million parameters or more, else float32."""


class EngineSettings(SchedulerSettings):
    """Settings of one CPU engine."""

    model_path: Path
    """Model directory in Hugging Face layout: config.json, safetensors, tokenizer.json."""
    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback require an API key."""
    port: int = Field(default=30000, ge=0, le=65535)
    """TCP port; 0 picks a free one and prints it."""
    max_running: int = Field(default=128, ge=1, le=4096)
    """Maximum number of requests decoded together (batch slots)."""
    max_total_tokens: int = Field(default=0, ge=0)
    """KV cache size in tokens, for running requests and cached prefixes; 0: as many as fit in 1 GiB."""
    weight_version: str = "default"
    """Version label of the weights in `model_path`, reported with every token until the first update."""
    date: Date | None = None
    """Date (YYYY-MM-DD) for chat templates that contain one. Use the run's, for the same prompts as in training.
    Default: the day (UTC) of the engine's start."""
    api_key_env: str = ""
    """Name of the environment variable with the API key of all routes; empty: no key."""
    admin_api_key_env: str = ""
    """Name of the environment variable with the admin key of the control routes; empty: no key."""
    incremental_streaming_output: bool = False
    """Send only the new tokens in each chunk of a stream, instead of all tokens so far."""
    update_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Timeout in seconds for the trainer, when joining an update group and when receiving a broadcast."""
    seed: int | None = None
    """Seed for requests without `sampling_seed`. Default: a random one, so that no two engines draw the same."""


def parse(argv: Sequence[str] | None = None) -> EngineSettings:
    """Parse the command line. Exits with code 2 on a wrong flag, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout_server.cpu_engine",
        description="Inference engine for small models on CPUs, with SGLang's HTTP API.",
    )
    for name, field in EngineSettings.model_fields.items():
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        default = "required" if field.is_required() else f"default: {field.default or 'none'}"
        switch: dict[str, str] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(
            "--" + name.replace("_", "-"),
            **switch,
            required=field.is_required(),
            choices=choices,
            default=argparse.SUPPRESS,
            help=f"{descriptions(EngineSettings)[name]} ({default})".replace("%", "%%"),
            metavar=None if choices else name.split("_")[-1].upper(),
        )
    given = vars(parser.parse_args(argv))
    try:
        return EngineSettings.model_validate(given)
    except ValueError as error:
        parser.error("; ".join(str(error).splitlines()[1:3]))


def read_keys(settings: EngineSettings, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return (API key, admin key), "" for none. Raises UserError if a named variable is empty, or a key is needed."""
    keys = tuple(_secret(name, environ) for name in (settings.api_key_env, settings.admin_api_key_env))
    if not is_loopback(settings.host) and not keys[0]:
        raise UserError(
            f"refusing to listen on {settings.host} without an API key",
            why="anyone who can reach this port could generate text and replace the weights",
            todo="export FORAY_ENGINE_KEY=$(openssl rand -hex 24) and add --api-key-env FORAY_ENGINE_KEY",
        )
    return keys[0], keys[1]


def _secret(name: str, environ: Mapping[str, str]) -> str:
    if not name:
        return ""
    value = environ.get(name, "").strip()
    if not value:
        raise UserError(f"the environment variable {name} is not set", why="it must contain a key of the engine")
    return value
