"""Programs that attack: each is run under every set of mechanisms that should hold against it, for real."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import UserError
from rollout_server.tools.sandbox import capabilities as mechanisms
from rollout_server.tools.sandbox import runner as confined
from rollout_server.tools.sandbox import seccomp
from rollout_server.tools.sandbox.capabilities import MECHANISMS, missing, require
from rollout_server.tools.sandbox.runner import JailError, Limits, Ran, run_confined
from rollout_server.tools.sandbox.seccomp import ALLOWED, CONDITIONAL
from tests.support.kernel import skip_or_fail

LIMITS = Limits(wall_s=10.0, cpu_s=5, memory_mb=256, file_mb=4, threads=8, output_bytes=4000)
SETS = (("namespaces",), ("landlock", "seccomp"), MECHANISMS)
ANY = (*SETS, ("seccomp",))


@pytest.fixture(params=SETS, ids="+".join)
def held(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """A set of mechanisms by which network, files and processes are isolated."""
    return _held(request.param)


def _held(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if missing(LIMITS, name):
            skip_or_fail(name, missing(LIMITS, name))
    return names


@pytest.fixture
def near() -> Iterator[Path]:
    """A directory that anybody may read and write: only the jail is in the way. (pytest's own is the user's alone.)"""
    with tempfile.TemporaryDirectory(prefix="foray-near-") as directory:
        os.chmod(directory, 0o777)
        path = Path(directory)
        (path / "canary").write_text("alive")
        os.chmod(path / "canary", 0o666)
        yield path


async def run(source: str, names: tuple[str, ...], limits: Limits = LIMITS) -> Ran:
    return await run_confined(textwrap.dedent(source), limits, names)


def jailed(mark: str) -> list[int]:
    """Processes with `mark` among their arguments: every one of a jail's has the jail's."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdecimal() and mark.encode() in Path("/proc", entry, "cmdline").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def somebody_is_there(mark: str, number: int) -> None:
    deadline = time.monotonic() + 10
    while len(jailed(mark)) < number:
        assert time.monotonic() < deadline, "the program does not start"
        time.sleep(0.01)


def nobody_left(mark: str) -> None:
    deadline = time.monotonic() + 5
    while jailed(mark):
        assert time.monotonic() < deadline, "a process outlived its program"
        time.sleep(0.02)


async def test_a_program_runs_and_says_what_it_computed(held: tuple[str, ...]) -> None:
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
        held,
    )
    assert (ran.code, ran.stderr) == (0, b"")
    assert ran.stdout.decode().splitlines() == ["0", "1", '[2432902008176640000, "kept", ["a"]]']


async def test_nothing_of_a_program_is_there_in_the_next(held: tuple[str, ...]) -> None:
    first = await run("import builtins, os; builtins.x = 1; open('x', 'w'); print(os.listdir())", held)
    second = await run("import builtins, os; print(hasattr(builtins, 'x'), os.listdir())", held)
    assert (first.stdout, second.stdout) == (b"['x']\n", b"False []\n")


async def test_it_reaches_no_network(held: tuple[str, ...], near: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        for listening in (tcp, udp):
            listening.setblocking(False)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(near / "socket"))
        os.chmod(near / "socket", 0o777)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0foray-{os.getpid()}-{'-'.join(held)}")
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
                held,
            )
            said = ran.stdout.decode().splitlines()
            assert len(said) == 9 and all(line.startswith("held") for line in said), (ran.stdout, ran.stderr)
            for listening in (tcp, unix, abstract):
                with pytest.raises(BlockingIOError):
                    listening.accept()
            with pytest.raises(BlockingIOError):
                udp.recv(1)


async def test_it_reads_nothing_of_this_machine(
    held: tuple[str, ...], near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        held,
    )
    assert ran.stdout.decode().splitlines() == ["['LC_CTYPE'] [''] True", "through"], (ran.stdout, ran.stderr)


async def test_it_writes_nothing_outside_its_directory(held: tuple[str, ...], near: Path) -> None:
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
        held,
    )
    assert ran.stdout == b"through\n", (ran.stdout, ran.stderr)
    found = os.stat(near / "canary")
    assert os.listdir(near) == ["canary"] and (near / "canary").read_text() == "alive"
    assert found.st_mode & 0o777 == 0o666 and found.st_mtime > 1 and found.st_uid == os.getuid()


@pytest.mark.parametrize("names", ANY, ids="+".join)
async def test_it_touches_no_process_outside(names: tuple[str, ...]) -> None:
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
            _held(names),
        )
        assert ran.stdout.decode().endswith("through\n"), (ran.stdout, ran.stderr)
        assert ran.stdout == b"through\n"
        assert victim.returncode is None
    finally:
        victim.kill()
        assert await victim.wait() == -signal.SIGKILL


async def test_its_parent_survives_whatever_it_signals(held: tuple[str, ...], near: Path) -> None:
    """It may end itself and what it started, and the answer is still a run that ended."""
    for target in ("os.getppid()", "1", "-1", "0", "os.getpid()"):
        ran = await run(f"import os\ntry:\n os.kill({target}, 9)\nfinally:\n print('on')", held)
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
async def test_no_process_outlives_it(held: tuple[str, ...], attack: str, near: Path) -> None:
    started = time.monotonic()
    source = textwrap.dedent(FORKS[attack])
    # named in the arguments of each of the jail's processes
    ran = await run_confined(source, LIMITS, held, libraries=(str(near),))
    nobody_left(str(near))
    assert ran.code == 0 and time.monotonic() - started < 8
    if "seccomp" in held:
        refused = await run("import os; os.fork()", held)
        assert b"PermissionError" in refused.stderr


async def test_it_runs_no_other_program(held: tuple[str, ...]) -> None:
    ran = await run(
        """
        import os, subprocess, sys
        for act in (
            lambda: subprocess.run(["/bin/sh", "-c", "echo RAN"]), lambda: os.execv("/usr/bin/id", ["id"]),
            lambda: os.posix_spawn(sys.executable, ["python", "-c", "print('RAN')"], {}),
            lambda: subprocess.run(["/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "--version"]),
        ):
            try:
                act()
            except OSError:
                print("held")
        """,
        held,
    )
    if held == ("namespaces",):  # where it may fork, there is nothing to run but the loader
        assert b"RAN" not in ran.stdout and b"uid=" not in ran.stdout
    else:
        assert ran.stdout == b"held\n" * 4, ran


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
    ran = await run(bomb, tuple(name for name in MECHANISMS if not missing(LIMITS, name)))
    assert ran.code == 1 and b"MemoryError" in ran.stderr and b"jail" not in ran.stderr


async def test_a_loop_ends_at_the_deadline_and_processor_time_before_it(held: tuple[str, ...], near: Path) -> None:
    limits = Limits(0.7, 5, 256, 4, 8, 4000)
    started = time.monotonic()
    stubborn = (
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    )
    ran = await run_confined(stubborn + "print('on')\nwhile True: pass", limits, held, libraries=(str(near),))
    assert (ran.late, ran.stdout) == (True, b"on\n") and time.monotonic() - started < 5
    nobody_left(str(near))


async def test_processor_time_is_bounded() -> None:
    limits = Limits(30.0, 1, 256, 4, 8, 4000)
    ran = await run("while True: pass", tuple(name for name in MECHANISMS if not missing(LIMITS, name)), limits)
    assert (ran.late, ran.code) == (False, 128 + signal.SIGXCPU)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_is_read_to_its_cap_and_the_program_ended(stream: str, held: tuple[str, ...]) -> None:
    started = time.monotonic()
    ran = await run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)", held)
    assert ran.flooded and not ran.late and time.monotonic() - started < 8
    assert getattr(ran, stream) == b"x" * LIMITS.output_bytes


async def test_files_are_bounded(held: tuple[str, ...]) -> None:
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
        held,
    )
    assert ran.stdout in (b"EFBIG\n", b"ENOSPC\n"), ran


async def test_with_namespaces_all_files_together_are_bounded_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = await run(
        "for i in range(9):\n    open(str(i), 'wb').write(b'x' * (1 << 20))",
        _held(("namespaces",)),
    )
    assert b"No space left" in ran.stderr
    assert not list(tmp_path.glob("foray-jail-*"))


async def test_privileges_cannot_be_had_again(held: tuple[str, ...]) -> None:
    ran = await run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.mount(b"tmpfs", b".", b"tmpfs", 0, None), libc.umount2(b"/", 2), libc.chroot(b"."),
              libc.prctl(38, 0, 0, 0, 0), libc.ptrace(16, os.getppid(), 0, 0), libc.setns(0, 0))
        for change in (lambda: os.setuid(0), lambda: os.setgroups([0])):
            try:
                change()
                if os.getuid() == 0 and os.access("/", os.W_OK):
                    print("ROOT")
            except OSError:
                pass
        """,
        held,
    )
    assert ran.stdout == b"-1 -1 -1 -1 -1 -1\n", ran


async def test_a_cancelled_call_takes_its_program_along(held: tuple[str, ...], near: Path) -> None:
    task = asyncio.create_task(run_confined("import time; time.sleep(60)", LIMITS, held, libraries=(str(near),)))
    await asyncio.to_thread(somebody_is_there, str(near), 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    nobody_left(str(near))


def test_a_server_that_is_killed_takes_its_programs_along(held: tuple[str, ...], near: Path) -> None:
    code = (
        "import asyncio, sys; from rollout_server.tools.sandbox.runner import *;"
        "limits = Limits(60, 5, 256, 4, 8, 99);"
        f"asyncio.run(run_confined('import time; time.sleep(60)', limits, {held!r}, sys.argv[1:]))"
    )
    # what it cannot clean up any more, an empty directory a program, is left where the fixture does
    server = subprocess.Popen([sys.executable, "-c", code, str(near)], env={**os.environ, "TMPDIR": str(near)})
    try:
        # the server, the process that waits for the jail, the first of its tree where there is one, the program
        somebody_is_there(str(near), 4 if "namespaces" in held else 3)
    finally:
        server.kill()
        server.wait()
    nobody_left(str(near))


async def test_what_cannot_be_confined_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "readable", lambda libraries: ["/nowhere/at/all"])
    for names in (("namespaces",), ("landlock",)):
        if not missing(LIMITS, names[0]):
            with pytest.raises(JailError, match="No such file"):
                await run("print('RAN')", names)
    with pytest.raises(JailError, match="unknown"):
        await run("print('RAN')", ("moat",))


def test_without_isolation_the_tool_is_refused_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "MECHANISMS", ())
    with pytest.raises(UserError, match="files, network, processes") as refused:
        require(LIMITS)
    assert "allow_unisolated" in refused.value.todo
    assert require(LIMITS, allow_unisolated=True) == ()


@pytest.mark.parametrize(("names", "refused"), [(("seccomp",), "files"), (("landlock",), "network, processes")])
def test_each_property_needs_a_mechanism_that_holds_it(
    names: tuple[str, ...], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _held(names)
    monkeypatch.setattr(mechanisms, "MECHANISMS", names)
    with pytest.raises(UserError, match=f"this machine: {refused}$"):
        require(LIMITS)


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
    ids=["x86_64", "aarch64"],
)
def test_the_numbers_of_system_calls_are_the_kernels(column: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", Path(header).read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in found} | ({"newfstatat": 79} if column else {})
    for name, ours in {**ALLOWED, **CONDITIONAL}.items():
        assert numbers.get(name) == ours[column], name


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_no_path_through_the_filter_leads_nowhere(machine: str) -> None:
    filtered = seccomp.filter_for(machine, 7)
    assert len(filtered) < 4096 and filtered[-1][0] == seccomp.RETURN
    for place, (code, true, false, _) in enumerate(filtered):
        if code in (seccomp.EQUAL, seccomp.ANY_BIT):
            assert place + 1 + max(true, false) < len(filtered)
