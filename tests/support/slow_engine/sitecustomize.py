"""On the PYTHONPATH of a CPU engine: makes its steps slow, or hangs its scheduler thread.

SLOW_STEP_S  seconds of a step, divided over its layers
HANG_FILE    while it exists, the next step blocks for ever, or spins if the file says so
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

if "rollout_server.cpu_engine" in sys.orig_argv:
    from rollout_server.cpu_engine.model.llama import CausalLM

    step_s, hang = float(os.environ.get("SLOW_STEP_S", "0")), Path(os.environ.get("HANG_FILE", "/nonexistent"))
    mlp = CausalLM._mlp

    def slow(self: CausalLM, *given: Any) -> Any:
        time.sleep(step_s / self.config.layers)
        if hang.exists():
            spins = hang.read_text() == "spin"
            while True:
                time.sleep(0.0 if spins else 3600.0)
        return mlp(self, *given)

    CausalLM._mlp = slow  # type: ignore[method-assign]
