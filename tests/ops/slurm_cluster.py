"""Slurm on this machine: a controller and several `slurmd`, each a node, with a munge of their own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from protocol.runtime.net import free_port
from tests.support.waiting import wait_until

CONF = """\
ClusterName=ops
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
CommunicationParameters=NoAddrCache
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SlurmdParameters=config_overrides
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=1
SlurmdTimeout=10
KillWait=20
JobRequeue=1
MinJobAge=600
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """`run` calls a command of Slurm; `env` is what commands need to find this cluster."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.nodes = {f"n{number}": free_port() for number in range(1, nodes + 1)}

    def run(self, *argv: str) -> str:
        """Return the output of a command."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert not done.returncode, f"{argv}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def queue(self) -> list[str]:
        """Return `name task state node` of each job."""
        return self.run("squeue", "--noheader", "--array", "--format=%j %K %T %N").splitlines()

    def start_now(self, name: str) -> None:
        """Do not wait for the two minutes after which Slurm starts a requeued job again."""
        jobs = self.run("squeue", "--noheader", "--array", f"--name={name}", "--states=PENDING", "--format=%i")
        for job in jobs.split():
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def slurm(nodes: int) -> Iterator[Cluster]:
    """Run a cluster inside the block; ends what it started."""
    with tempfile.TemporaryDirectory(prefix="foray-slurm-") as name, ExitStack() as held:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = Cluster(folder, nodes)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        text = CONF.format(folder=folder, port=free_port(), host=socket.gethostname())
        text += "".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=8 "
            "RealMemory=1000 State=UNKNOWN\n"
            for node, port in cluster.nodes.items()
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = (f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock", f"--log-file={folder}/munge.log")
        more = (f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed")

        def daemon(*argv: str) -> None:
            with (folder / "daemons.log").open("ab") as log:
                child = subprocess.Popen(argv, env=cluster.env, stdout=log, stderr=log)
            held.callback(child.wait, 30)
            held.callback(child.terminate)

        daemon("munged", "--foreground", "--force", *munge, *more)
        wait_until(lambda: (folder / "munge.sock").exists(), "munge answers", 20)
        daemon("slurmctld", "-D", "-c")
        for node in cluster.nodes:
            daemon("slurmd", "-D", "-N", node, "-c")
        try:
            wait_until(lambda: set(_states(cluster).values()) == {"idle"}, "every node is idle", 60)
        except BaseException:
            for log in sorted(folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
            raise
        yield cluster
        cluster.run("scancel", "--user=root")
        wait_until(lambda: not cluster.queue(), "the jobs have ended", 60)


def _states(cluster: Cluster) -> dict[str, str]:
    try:
        return cluster.states()
    except AssertionError:  # the controller does not answer yet
        return {}
