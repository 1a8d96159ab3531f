"""Settings of one engine and its command line. Imports no torch, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from datetime import date as Date
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import Field

from protocol.errors import UserError
from protocol.runtime.field_docs import descriptions
from protocol.settings import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class EngineSettings(Settings):
    """What one embedded engine is started with."""

    model_path: Path
    """Directory in Hugging Face layout: config.json, safetensors, tokenizer.json."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback needs an API key."""
    port: int = Field(default=30000, ge=0, le=65535)
    """TCP port; 0 takes a free one and prints it."""
    max_running: int = Field(default=128, ge=1, le=4096)
    """Most requests decoded together (slots)."""
    max_total_tokens: int = Field(default=0, ge=0)
    """Most tokens whose keys and values are held, running and cached together; 0: as many as fit in 1 GiB."""
    weight_version: str = "default"
    """Label of the weights in `model_path`, reported with every token until the first update."""
    date: Date | None = None
    """Day (2026-01-31) that a chat template with a date in it says: the run's, for prompts as in training. Without one:
    the day (UTC) of the engine's start."""
    threads: int = Field(default=1, ge=1)
    """Threads of torch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and cache; logits and log-probs are always float32."""
    api_key_env: str = ""
    """Name of the environment variable that holds the API key of all routes; empty: none."""
    admin_api_key_env: str = ""
    """Name of the environment variable that holds the key of the control routes; empty: none."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens after which a stream gets its next chunk, unless its sampling parameters say otherwise."""
    incremental_streaming_output: bool = False
    """Send in each chunk of a stream only what is new, instead of all since the beginning."""
    update_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Longest wait for the trainer, in joining an update group and in receiving one broadcast, seconds."""
    seed: int = 0
    """Seed of requests that bring no `sampling_seed`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged to standard error."""


def parse(argv: Sequence[str] | None = None) -> EngineSettings:
    """The command line as settings; leaves the process with code 2 on a wrong flag, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout_server.cpu_engine",
        description="Inference engine for small models on CPUs that speaks SGLang's HTTP API.",
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
    """(API key, admin key), "" where none is set. Raises UserError for a named but empty variable, or an open bind."""
    keys = tuple(_secret(name, environ) for name in (settings.api_key_env, settings.admin_api_key_env))
    if settings.host not in LOOPBACK and not keys[0]:
        raise UserError(
            f"refusing to listen on {settings.host} without an API key",
            why="everybody who reaches this port could generate and replace weights",
            todo="export FORAY_ENGINE_KEY=$(openssl rand -hex 24) and add --api-key-env FORAY_ENGINE_KEY",
        )
    return keys[0], keys[1]


def _secret(name: str, environ: Mapping[str, str]) -> str:
    if not name:
        return ""
    value = environ.get(name, "").strip()
    if not value:
        raise UserError(f"the environment variable {name} is not set", why="it should hold a key of the engine")
    return value
