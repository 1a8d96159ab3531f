"""What runs inside the sandbox of the tool `python`, between the start of the process and the policy's program.

Standard library only: it is run by path with `python -I -S`. Linux only. What holds by which mechanism:

    property                       namespaces                       landlock                     seccomp
    no network                     an own, empty network            (TCP by address, ABI >= 4)   no socket can be made
    nothing outside is read        an own root: only the system's   only those may be opened,    -
                                   and Python's libraries, read-    though names and sizes of
                                   only; no /proc, /sys, /dev       others can still be asked
    nothing outside is written     the same; what the program       only its own directory       no chmod, chown, mount
                                   writes is memory of a bounded
                                   size that goes with it
    no process outlives it, or     an own process tree, which ends  (signals, ABI >= 6)          no process can be made,
    touches one outside            with its first process                                        no other one signalled

Resource limits hold beside them in any case: processor seconds, address space, size of a file, open files; where there
are namespaces also the number of threads and, without seccomp, of processes, of which each then has those limits.
Privileges are dropped, `no_new_privs` is set, and as root the program gets a user id of its own. None of it is a
defence against a hole in the kernel itself.
"""
