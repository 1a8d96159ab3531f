"""`python -m rollout_server.cpu_engine --model-path DIR`: reads flags and config.json before importing torch."""

from __future__ import annotations

import sys

from protocol.runtime.net import allow_many_files
from protocol.runtime.service_cli import exit_code
from rollout_server.cpu_engine.config import EngineSettings, parse, read_keys
from rollout_server.cpu_engine.model.config import read_model_config


def main() -> int:
    """Return the exit code: 0 after a clean stop, 2 for a user error."""
    settings = parse()
    allow_many_files()
    return exit_code(lambda: _serve(settings))


def _serve(settings: EngineSettings) -> None:
    keys = read_keys(settings)
    read_model_config(settings.model_path)
    from rollout_server.cpu_engine.server.app import serve

    serve(settings, *keys)


if __name__ == "__main__":
    sys.exit(main())
