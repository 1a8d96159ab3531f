"""`python -I -S -B DIRECTORY SPEC`: reads a program from stdin, confines itself, and runs it.

    this process          leaves with namespaces, waits for the next one, ends with its code
      first of the tree   (namespaces only) waits for the program; when it ends, the kernel ends everything in the tree
        the program       drops privileges, limits itself, Landlock, seccomp, then the policy's code

When the server dies, or ends this process, each of them dies with the one above it. SPEC is `Spec`, as `pack` writes
it. What was achieved is written to the descriptor `report` before the program starts: READY, or why not, and then
nothing of the program is run. Starting this is most of what a call costs, so it imports no more than it needs.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))
from rollout_server.tools.jail import kernel, landlock, namespaces, program, seccomp
from rollout_server.tools.jail.spec import READY, Spec, unpack

del sys.path[0]

FAILED = 120


def main() -> None:
    spec = unpack(sys.argv[1])
    try:
        unknown = set(spec.mechanisms) - {"namespaces", "landlock", "seccomp"}
        if unknown:
            raise OSError(f"unknown mechanisms: {', '.join(unknown)}")
        source = sys.stdin.buffer.read().decode("utf-8", "replace")
        _plug_stdin()
        os.nice(10)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if "namespaces" in spec.mechanisms:
            namespaces.enter(os.getcwd(), spec.readable, spec.file_mb)
            _wait_for_child()  # the first of the tree goes on below
            _become(spec.uid)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        _wait_for_child()
        _confine(spec)
    except OSError as error:
        os.write(spec.report, str(error).encode("utf-8", "replace"))
        os._exit(FAILED)
    os.write(spec.report, READY)
    os.closerange(3, 256)
    sys.path += spec.libraries
    sys.argv = [""]
    for name in [name for name in sys.modules if name.startswith("rollout_server")]:
        del sys.modules[name]
    program.run(source)


def _wait_for_child() -> None:
    """Fork: the child returns, and dies when its parent does. The parent stays, and ends as its child ended."""
    child = os.fork()
    if child == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    # asked to end, it takes its child along and collects it, so that no zombie is left to whoever adopts orphans
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _end_like(child)


def _end_like(child: int) -> None:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _become(uid: int) -> None:
    """As root: another user, of no group, without capabilities. Else: without capabilities."""
    if os.getuid() == 0:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # a container that knows no such user
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it


def _confine(spec: Spec) -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if "namespaces" not in spec.mechanisms:
        kernel.drop_capabilities()
    for limit, value in (
        (resource.RLIMIT_AS, spec.memory_mb << 20),
        (resource.RLIMIT_CPU, spec.cpu_s),
        (resource.RLIMIT_FSIZE, spec.file_mb << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _limit(limit, value)
    if "namespaces" in spec.mechanisms:  # elsewhere it would count all that this user runs
        _limit(resource.RLIMIT_NPROC, spec.threads)
    if "landlock" in spec.mechanisms:
        landlock.restrict(spec.readable, os.getcwd())
    if "seccomp" in spec.mechanisms:
        seccomp.install()


def _limit(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # the soft limit on processor time comes first: it can be told from a kill
    resource.setrlimit(limit, (value, value + 1 if limit == resource.RLIMIT_CPU else value))


def _plug_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main()
