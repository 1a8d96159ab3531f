"""`python -I -S -B DIRECTORY SPEC`: reads a program from stdin, confines itself, and runs it.

    this process          leaves with namespaces, waits for the next one, ends with its code
      first of the tree   (namespaces only) waits for the program; when it ends, the kernel ends everything in the tree
        the program       drops privileges, limits itself, Landlock, seccomp, then the policy's code

When the server dies, or ends this process, each of them dies with the one above it. SPEC is `Spec`, as `pack` writes
it. What was achieved is written to the descriptor `report` before the program starts: READY, or why not, and then
nothing of the program is run. Starting this is most of what a call costs, so it imports no more than it needs.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys

from rollout_server.tools.sandbox import linux as kernel
from rollout_server.tools.sandbox import linux as landlock
from rollout_server.tools.sandbox import linux as namespaces
from rollout_server.tools.sandbox import seccomp
from rollout_server.tools.sandbox.spec import READY, Spec, unpack

# Running the policy's program in this interpreter, which is confined by now.

NAME = "program.py"


def run(source: str) -> None:
    """Run `source` as `__main__`; what it raises is printed as a traceback of its own lines, and ends this process.

    Returns when the program is through: the interpreter then ends as any does, threads joined and streams flushed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # by lines, so that a program that is killed has said what it said
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    # a module of its own, where dataclasses and pickle look names up; the jail's must stay, it is still running
    _jail, sys.modules["__main__"] = sys.modules["__main__"], type(sys)("__main__")
    try:
        exec(compile(source, NAME, "exec"), sys.modules["__main__"].__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        try:
            told = _explain(error, source)
        except MemoryError:  # of which the program has left nothing
            told = f"{type(error).__name__}\n"
        sys.stderr.write(told)
        sys.exit(1)


def _explain(error: BaseException, source: str) -> str:
    """The traceback without the frames of libraries, whose paths are this machine's and say nothing to a policy."""
    import linecache  # only now: they take as long to import as the jail takes to start
    import traceback

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    told = traceback.TracebackException.from_exception(error, compact=True)
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if frame.filename == NAME][-8:])
    return "".join(told.format(chain=False))


sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

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
    run(source)


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
