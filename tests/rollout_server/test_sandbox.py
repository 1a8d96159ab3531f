"""Programs that attack the sandbox of this machine, with the real bubblewrap."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import UserError
from rollout_server.tools.sandbox import bubblewrap, build_sandbox
from rollout_server.tools.sandbox.base import BubblewrapSettings, ProgramResult, SandboxError, SandboxLimits
from rollout_server.tools.sandbox.bubblewrap import Bubblewrap, check_isolation, command
from tests.support.sandboxes import require_bubblewrap

LIMITS = SandboxLimits(wall_s=30.0, cpu_s=5, memory_mb=256, file_mb=4, threads=8, output_bytes=4000)


@pytest.fixture(autouse=True, scope="module")
def bwrap() -> None:
    require_bubblewrap()


@pytest.fixture
def near() -> Iterator[Path]:
    """A directory that anybody may read and write: only the sandbox is in the way. (pytest's own is private.)"""
    with tempfile.TemporaryDirectory(prefix="foray-near-") as directory:
        os.chmod(directory, 0o777)
        path = Path(directory)
        (path / "canary").write_text("alive")
        os.chmod(path / "canary", 0o666)
        yield path


async def run(source: str, limits: SandboxLimits = LIMITS, libraries: tuple[str, ...] = ()) -> ProgramResult:
    sandbox = build_sandbox(BubblewrapSettings(), limits, libraries)
    return await sandbox.run(textwrap.dedent(source))


def sandboxed(mark: str) -> list[int]:
    """Processes with `mark` among their arguments: every one of a sandbox has the sandbox's."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdecimal() and mark.encode() in Path("/proc", entry, "cmdline").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def wait_for_processes(mark: str, number: int) -> None:
    deadline = time.monotonic() + 30
    while len(sandboxed(mark)) < number:
        assert time.monotonic() < deadline, "the program does not start"
        time.sleep(0.01)


def assert_all_ended(mark: str) -> None:
    deadline = time.monotonic() + 5
    while sandboxed(mark):
        assert time.monotonic() < deadline, "a process outlived its program"
        time.sleep(0.02)


async def test_a_program_runs_and_says_what_it_computed() -> None:
    ran = await run(
        """
        import asyncio, json, math, os, random, sqlite3, tempfile, threading
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        open("note", "w").write("kept")
        os.makedirs("a/b"); os.rename("note", "a/b/note")
        threads = [threading.Thread(target=print, args=(n,)) for n in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        async def main():
            await asyncio.sleep(0.001)
            return math.factorial(20)
        print(json.dumps([asyncio.run(main()), open("a/b/note").read(), os.listdir(".")]))
        """,
    )
    assert (ran.code, ran.stderr) == (0, b"")
    assert ran.stdout.decode().splitlines() == ["0", "1", '[2432902008176640000, "kept", ["a"]]']


async def test_nothing_of_a_program_is_there_in_the_next() -> None:
    first = await run("import builtins, os; builtins.x = 1; open('x', 'w'); print(os.listdir())")
    second = await run("import builtins, os; print(hasattr(builtins, 'x'), os.listdir())")
    assert (first.stdout, second.stdout) == (b"['x']\n", b"False []\n")


async def test_it_reaches_no_network(near: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        for listening in (tcp, udp):
            listening.setblocking(False)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(near / "socket"))
        os.chmod(near / "socket", 0o777)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0foray-{os.getpid()}")
        with unix, abstract:
            for listening in (unix, abstract):
                listening.listen()
                listening.setblocking(False)
            ran = await run(
                f"""
                import socket
                def attempt(name, act):
                    try:
                        act()
                        print("REACHED", name)
                    except OSError as error:
                        print("held", name)
                def to(family, kind, where):
                    def act():
                        with socket.socket(family, kind) as s:
                            s.settimeout(1)
                            s.connect(where); s.send(b"x")
                    return act
                attempt("tcp", to(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {tcp.getsockname()[1]})))
                attempt("udp", to(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {udp.getsockname()[1]})))
                attempt("far", to(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)))
                attempt("v6", to(socket.AF_INET6, socket.SOCK_DGRAM, ("::1", 53)))
                attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).sendto(b"x", ("127.0.0.1", 0)))
                attempt("netlink", to(socket.AF_UNIX, socket.SOCK_STREAM, {str(near / "socket")!r}))
                attempt("abstract", to(socket.AF_UNIX, socket.SOCK_STREAM, {abstract.getsockname()!r}))
                attempt("name", lambda: socket.getaddrinfo("example.org", 80))
                attempt("pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(
                    b"x", {str(near / "socket")!r}))
                """,
            )
            said = ran.stdout.decode().splitlines()
            # its own loopback device takes datagrams; that none arrives outside is asserted below
            reached = {line.split()[1] for line in said if not line.startswith("held")}
            assert len(said) == 9 and reached <= {"udp", "v6"}, (ran.stdout, ran.stderr)
            for listening in (tcp, unix, abstract):
                with pytest.raises(BlockingIOError):
                    listening.accept()
            with pytest.raises(BlockingIOError):
                udp.recv(1)


async def test_it_reads_nothing_of_this_machine(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORAY_SECRET", "hunter2")
    wanted = ["/etc/passwd", "/etc/hostname", str(near / "canary"), f"/proc/{os.getpid()}/environ"]
    wanted += [
        f"/proc/{os.getpid()}/cmdline",
        "/proc/self/status",
        "/proc/1/cmdline",
        __file__,
        "/dev/mem",
        "/dev/null",
    ]
    ran = await run(
        f"""
        import os, sys
        print(sorted(os.environ), sys.argv, sys.stdin.read() == "")
        for path in {wanted}:
            for act in (lambda: open(path, "rb").read(9), lambda: open("../../../.." + path, "rb").read(9)):
                try:
                    print("READ", path, act())
                except OSError:
                    pass
        for path in ("/home", "/etc", "/proc/self/fd", {str(near)!r}):
            try:
                print("LISTED", path, os.listdir(path))
            except OSError:
                pass
        os.symlink("/etc/passwd", "link")
        try:
            print("READ", open("link").read(9))
        except OSError:
            print("through")
        """,
    )
    assert ran.stdout.decode().splitlines() == ["[] [''] True", "through"], (ran.stdout, ran.stderr)


async def test_it_writes_nothing_outside_its_directory(near: Path) -> None:
    ran = await run(
        f"""
        import os, shutil, sysconfig
        near, canary = {str(near)!r}, {str(near / "canary")!r}
        for act in (
            lambda: open(canary, "w").write("dead"), lambda: open(canary, "a").write("dead"), lambda: os.remove(canary),
            lambda: os.truncate(canary, 0), lambda: os.rename(canary, canary + "2"), lambda: os.mkdir(near + "/new"),
            lambda: open(near + "/new", "x"), lambda: os.symlink("x", near + "/new"), lambda: os.chmod(canary, 0o777),
            lambda: os.link(canary, "mine"), lambda: os.utime(canary, (1, 1)), lambda: os.mkfifo(near + "/new"),
            lambda: open(os.path.join(sysconfig.get_path("stdlib"), "evil.py"), "w"), lambda: os.chown(canary, 1, 1),
            lambda: open("/evil", "w"), lambda: os.rmdir(near), lambda: open("/dev/shm/evil", "w"),
            lambda: os.rename("/tmp", "/tmp2"),
        ):
            try:
                act()
                print("DONE", act.__code__.co_firstlineno, act.__code__.co_names)
            except OSError:
                pass
        print("through")
        """,
    )
    assert ran.stdout == b"through\n", (ran.stdout, ran.stderr)
    found = os.stat(near / "canary")
    assert os.listdir(near) == ["canary"] and (near / "canary").read_text() == "alive"
    assert found.st_mode & 0o777 == 0o666 and found.st_mtime > 1 and found.st_uid == os.getuid()


async def test_it_touches_no_process_outside() -> None:
    victim = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        ran = await run(
            f"""
            import fcntl, os, signal
            def attempt(act):
                try:
                    act()
                    print("DONE")
                except OSError:
                    pass
            for pid in ({victim.pid}, {os.getpid()}, -{os.getpgid(0)}):
                for number in (signal.SIGKILL, signal.SIGTERM, 0):
                    attempt(lambda: os.kill(pid, number))
            attempt(lambda: os.killpg({os.getpgid(0)}, signal.SIGKILL))
            attempt(lambda: os.sched_setaffinity({victim.pid}, [0]))
            attempt(lambda: os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19))
            read, write = os.pipe()
            attempt(lambda: fcntl.fcntl(read, fcntl.F_SETOWN, {victim.pid}))
            print("through")
            """,
        )
        assert ran.stdout.decode().endswith("through\n"), (ran.stdout, ran.stderr)
        assert ran.stdout == b"through\n"
        assert victim.returncode is None
    finally:
        victim.kill()
        assert await victim.wait() == -signal.SIGKILL


async def test_its_parent_survives_whatever_it_signals(near: Path) -> None:
    """It may end itself and what it started, and the answer is still a run that ended."""
    for target in ("os.getppid()", "1", "-1", "0", "os.getpid()"):
        ran = await run(f"import os\ntry:\n os.kill({target}, 9)\nfinally:\n print('on')")
        assert ran.code in (0, 1, 137), (target, ran)
        assert ran.stdout == b"on\n" or target in ("-1", "0", "os.getpid()")


FORKS = {
    "bomb": """
        import os, time
        for _ in range(40):
            try:
                os.fork()
            except OSError:
                pass
        time.sleep(0.1)
    """,
    "orphan": """
        import os, signal, sys, time
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        try:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.closerange(0, 64)
                    time.sleep(60)
                os._exit(0)
        except OSError:
            pass
    """,
}


@pytest.mark.parametrize("attack", FORKS)
async def test_no_process_outlives_it(attack: str, near: Path) -> None:
    started = time.monotonic()
    source = textwrap.dedent(FORKS[attack])
    # a library is named in the arguments of each process of the sandbox
    ran = await run(source, libraries=(str(near),))
    assert_all_ended(str(near))
    assert ran.code == 0 and time.monotonic() - started < 28


async def test_processes_and_threads_are_bounded_together() -> None:
    ran = await run(
        """
        import os, threading, time
        started = 0
        for _ in range(40):
            try:
                if os.fork() == 0:
                    time.sleep(60)
                started += 1
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                started += 1
            except (OSError, RuntimeError):
                pass
        print(started)
        """
    )
    assert ran.stdout == b"%d\n" % (LIMITS.threads - 1), ran


async def test_a_child_process_has_the_same_limits() -> None:
    ran = await run(
        """
        import os, resource, subprocess, sys
        names = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE")
        source = "import resource, socket; print([resource.getrlimit(getattr(resource, n)) for n in {names}]); "
        source += "print(socket.socket().connect_ex(('192.0.2.1', 53)))"
        library = {"LD_LIBRARY_PATH": os.path.join(sys.base_prefix, "lib")}
        child = subprocess.run([sys.executable, "-I", "-S", "-c", source.format(names=names)], env=library,
                               capture_output=True, text=True)
        own = [resource.getrlimit(getattr(resource, name)) for name in names]
        for name in names:
            try:
                resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY,) * 2)
                print("RAISED", name)
            except (OSError, ValueError):
                pass
        print(child.stdout.splitlines() == [str(own), "101"], child.stderr)
        """
    )
    assert ran.stdout == b"True \n", ran


async def test_it_runs_no_program_of_the_host() -> None:
    ran = await run(
        """
        import os, subprocess
        for path in ("/bin/sh", "/usr/bin/sh", "/usr/bin/id", "/usr/bin/bwrap", "/usr/bin/setpriv", "/sbin/init"):
            try:
                subprocess.run([path, "--version"])
                print("RAN", path)
            except OSError:
                pass
        directories = filter(os.path.isdir, ("/bin", "/usr/bin", "/sbin", "/usr/sbin", "/usr/local/bin"))
        print([name for path in directories for name in os.listdir(path) if not name.startswith("python")])
        """,
    )
    assert ran.stdout == b"[]\n", ran


@pytest.mark.parametrize(
    "bomb",
    [
        "bytearray(1 << 40)",
        "[0] * (1 << 36)",
        "x = ['y']\nwhile True: x += x",
        "10 ** 10 ** 9 if 0 else b'x' * (1 << 34)",
    ],
    ids=["one", "list", "growing", "bytes"],
)
async def test_memory_is_bounded(bomb: str) -> None:
    ran = await run(bomb)
    assert ran.code == 1 and b"MemoryError" in ran.stderr and b"sandbox" not in ran.stderr


@pytest.mark.slow
async def test_a_loop_ends_at_the_deadline_and_processor_time_before_it(near: Path) -> None:
    limits = replace(LIMITS, wall_s=3.0)
    started = time.monotonic()
    stubborn = (
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    )
    ran = await run(stubborn + "print('on')\nwhile True: pass", limits, libraries=(str(near),))
    assert (ran.timed_out, ran.stdout) == (True, b"on\n") and time.monotonic() - started < 10
    assert_all_ended(str(near))


async def test_processor_time_is_bounded() -> None:
    ran = await run("while True: pass", replace(LIMITS, wall_s=30.0, cpu_s=1))
    assert (ran.timed_out, ran.code) == (False, 128 + signal.SIGXCPU)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_is_read_to_its_cap_and_the_program_ended(stream: str) -> None:
    started = time.monotonic()
    ran = await run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)")
    assert ran.output_exceeded and not ran.timed_out and time.monotonic() - started < 28
    assert getattr(ran, stream) == b"x" * LIMITS.output_bytes


async def test_files_are_bounded() -> None:
    ran = await run(
        """
        import errno, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("big", "wb") as file:
            try:
                for _ in range(64):
                    file.write(b"x" * (1 << 20)); file.flush()
            except OSError as error:
                print(errno.errorcode[error.errno])
        """,
    )
    assert ran.stdout in (b"EFBIG\n", b"ENOSPC\n"), ran


async def test_all_files_together_are_bounded_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = await run("for i in range(9):\n    open(str(i), 'wb').write(b'x' * (1 << 20))")
    assert b"No space left" in ran.stderr
    assert not list(tmp_path.iterdir())


async def test_privileges_cannot_be_had_again() -> None:
    ran = await run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.mount(b"tmpfs", b".", b"tmpfs", 0, None), libc.umount2(b"/", 2), libc.chroot(b"."),
              libc.prctl(38, 0, 0, 0, 0), libc.setns(0, 0),
              *(libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000)))
        for change in (lambda: os.setuid(0), lambda: os.setgroups([0])):
            try:
                change()
                if os.getuid() == 0 and os.access("/", os.W_OK):
                    print("ROOT")
            except OSError:
                pass
        """,
    )
    assert ran.stdout == b"-1 " * 8 + b"-1\n", ran


async def test_the_host_is_not_named() -> None:
    ran = await run("import os, socket; print(os.uname().nodename, socket.gethostname(), os.getcwd())")
    assert ran.stdout == b"sandbox sandbox /program\n"


async def test_keys_of_the_session_are_out_of_reach() -> None:
    """The kernel keeps keyrings apart from namespaces: a program must not find those of the server's session."""
    source = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        session, search, user = -3, 10, b"user"
        print(libc.syscall(250, search, session, user, b"foray-canary", 0) < 0)
        """
    code = f"""
import asyncio, ctypes, textwrap
from rollout_server.tools.sandbox import build_sandbox
from rollout_server.tools.sandbox.base import *
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(250, 1, None) > 0
assert libc.syscall(248, b"user", b"foray-canary", b"secret", 6, -3) > 0
assert libc.syscall(250, 10, -3, b"user", b"foray-canary", 0) > 0
print(asyncio.run(build_sandbox(BubblewrapSettings(), {LIMITS!r}).run(textwrap.dedent({source!r}))))
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the system calls are those of x86-64")
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert "stdout=b'True\\n'" in done.stdout, done


async def test_a_cancelled_call_takes_its_program_along(near: Path) -> None:
    task = asyncio.create_task(run("import time; time.sleep(60)", libraries=(str(near),)))
    await asyncio.to_thread(wait_for_processes, str(near), 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_all_ended(str(near))


def test_a_server_that_is_killed_takes_its_programs_along(near: Path) -> None:
    code = f"""
import asyncio, sys
from rollout_server.tools.sandbox import build_sandbox
from rollout_server.tools.sandbox.base import *
sandbox = build_sandbox(BubblewrapSettings(), {replace(LIMITS, wall_s=60)!r}, sys.argv[1:])
asyncio.run(sandbox.run("import time; time.sleep(60)"))
"""
    server = subprocess.Popen([sys.executable, "-c", code, str(near)])
    try:
        # the server, bwrap outside, bwrap as the first process inside, the program
        wait_for_processes(str(near), 4)
        time.sleep(0.5)
    finally:
        server.kill()
        server.wait()
    assert_all_ended(str(near))


async def test_what_cannot_be_isolated_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Bubblewrap(BubblewrapSettings(), LIMITS)
    shown = [argument if argument != "/usr/lib" else "/nowhere/at/all" for argument in command(LIMITS)]
    monkeypatch.setattr(sandbox, "_command", tuple(shown))
    with pytest.raises(SandboxError, match=r"bwrap: .*/nowhere/at/all"):
        await sandbox.run("print('RAN')")
    monkeypatch.setattr(sandbox, "_command", ("/nowhere/bwrap",))
    with pytest.raises(SandboxError, match="No such file"):
        await sandbox.run("print('RAN')")


@pytest.mark.parametrize(
    ("left_out", "reached"),
    [
        (("--unshare-all", "--unshare-pid", "--unshare-user", "--disable-userns"), "network"),
        (("--tmpfs",), "files"),
        (("--unshare-all", "--unshare-net", "--unshare-user", "--disable-userns"), "processes"),
    ],
)
def test_a_sandbox_that_leaks_is_refused(left_out: tuple[str, ...], reached: str) -> None:
    """The trial notices each property that does not hold: here one part of the command is replaced by a weaker one."""
    python, shown = sys.executable, ("--dev-bind", "/", "/") if reached == "files" else ()
    weaker = {
        "network": ("--unshare-pid", "--proc", "/proc"),
        "files": ("--unshare-net", "--unshare-pid", "--proc", "/proc"),
        "processes": ("--unshare-net",),
    }[reached]
    program = command(LIMITS)[command(LIMITS).index("-c") + 1]
    binds = [argument for path in bubblewrap.readable() for argument in ("--ro-bind", path, path)]
    real = os.path.realpath(getattr(sys, "_base_executable", "") or python)
    leaky = (
        shutil.which("bwrap") or "",
        *weaker,
        *(shown or (*binds, "--ro-bind", real, real)),
        real,
        "-I",
        "-S",
        "-c",
    )
    with pytest.raises(UserError) as refused:
        check_isolation((*leaky, program, "5", "256", "4", "64"))
    assert refused.value.why.startswith("a program reached:") and reached in refused.value.why


def test_without_bubblewrap_the_tool_is_refused_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError) as refused:
        build_sandbox(BubblewrapSettings(), LIMITS)
    assert refused.value.why == "bwrap is not installed"
    assert "apt-get install bubblewrap" in refused.value.todo and "type: service" in refused.value.todo


def test_where_namespaces_are_forbidden_the_tool_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError) as refused:
        build_sandbox(BubblewrapSettings(), LIMITS)
    assert "Operation not permitted" in refused.value.why and "user namespaces" in refused.value.todo
