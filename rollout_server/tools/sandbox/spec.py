"""How to confine a program: what the server tells the jail, in one argument of its command line."""

from __future__ import annotations

READY = b"ready"


class Spec:
    """How to confine.

    mechanisms         of namespaces, landlock, seccomp: each of them holds, or nothing is run
    readable           directories whose files may be read
    libraries          those of them that modules are imported from, besides the standard library
    uid                user and group of the program when this runs as root and with namespaces
    report             file descriptor that takes READY, or why it is not
    cpu_s, memory_mb, file_mb, threads  limits: seconds, MiB, MiB, a number

    A plain class, and plain text below: dataclasses and json take longer to import than all the rest of the jail.
    """

    def __init__(
        self,
        mechanisms: list[str],
        readable: list[str],
        libraries: list[str],
        *,
        uid: int,
        report: int,
        cpu_s: int,
        memory_mb: int,
        file_mb: int,
        threads: int,
    ) -> None:
        self.mechanisms, self.readable, self.libraries = mechanisms, readable, libraries
        self.uid, self.report = uid, report
        self.cpu_s, self.memory_mb, self.file_mb, self.threads = cpu_s, memory_mb, file_mb, threads


def pack(spec: Spec) -> str:
    """A line for the numbers, one for the lengths of the lists, then the lists, a line an entry."""
    numbers = (spec.uid, spec.report, spec.cpu_s, spec.memory_mb, spec.file_mb, spec.threads)
    lists = (spec.mechanisms, spec.readable, spec.libraries)
    head = [" ".join(map(str, numbers)), " ".join(str(len(one)) for one in lists)]
    return "\n".join([*head, *(entry for one in lists for entry in one)])


def unpack(text: str) -> Spec:
    """What `pack` wrote."""
    head, lengths, *entries = text.split("\n")
    uid, report, cpu_s, memory_mb, file_mb, threads = map(int, head.split())
    first, second, _ = map(int, lengths.split())
    return Spec(
        entries[:first],
        entries[first : first + second],
        entries[first + second :],
        uid=uid,
        report=report,
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        file_mb=file_mb,
        threads=threads,
    )
