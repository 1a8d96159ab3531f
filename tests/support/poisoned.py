"""Lives of a learner that a certain group kills while it is decoded, as a bug in a C library would.

`python -m tests.support.poisoned LIVES --config FILE`: starts the learner (tiny engine) LIVES times in turn, each
in its own process; a body with the word POISON in it ends the process with SIGSEGV. Prints the exit statuses as
JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from typing import Any

import learner.delivery.entry
from learner import cli

POISON = b"poison-poison"


def main() -> int:
    from tests.support import tiny_learner

    service = tiny_learner.service()
    service.serve.__kwdefaults__["make_engine"] = lambda run, settings: tiny_learner.TinyEngine(run, settings)
    real = learner.delivery.entry.decode

    def decode(raw: bytes) -> Any:
        if POISON in raw:
            ctypes.string_at(0)  # this thread, at this instruction: a signal sent would arrive a little later
        return real(raw)

    learner.delivery.entry.decode = decode
    statuses = []
    for _ in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = cli.main(sys.argv[2:])
            sys.stdout.flush()
            os._exit(status)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
