"""The configuration files of a SLURM cluster whose nodes are several slurmd on this machine, bound to the loopback address.

Everything runs as the calling user, without systemd or cgroups. Sources: the manuals of slurm.conf, slurmdbd.conf, gres.conf.
"""

import os
import pwd
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

KILL_OVER_MEMORY = ("JobAcctGatherParams=OverMemoryKill", "JobAcctGatherFrequency=task=2")
"""Lines of slurm.conf. A job that uses more than its --mem is killed within seconds. Without cgroups its state is FAILED."""

BLOCK = 200
"""Number of ports of a cluster."""


@dataclass(frozen=True)
class Ports:
    """Ports of a cluster. The first port of the block is held open as long as the cluster exists."""

    first: int

    @property
    def controller(self) -> int:
        """Port of slurmctld."""
        return self.first + 1

    @property
    def accounting(self) -> int:
        """Port of slurmdbd."""
        return self.first + 2

    @property
    def database(self) -> int:
        """Port of MariaDB."""
        return self.first + 3

    def node(self, number: int) -> int:
        """Port of the slurmd of a node, which is counted from 1."""
        return self.first + 10 + number


def claim_ports() -> tuple[Ports, socket.socket]:
    """A free block of ports, and a listening socket that reserves the block until it is closed.

    Blocks are below the range that the kernel uses for outgoing connections. Raises OSError if none is free.
    """
    for first in range(20000, 32000, BLOCK):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
            claim.listen()
        except OSError:
            claim.close()
            continue
        if all(_is_free(port) for port in range(first + 1, first + BLOCK)):
            return Ports(first), claim
        claim.close()
    raise OSError(f"no {BLOCK} consecutive free ports between 20000 and 32000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def user() -> str:
    """Name of the user that runs the cluster."""
    return pwd.getpwuid(os.geteuid()).pw_name


def slurm_version(answer: str) -> tuple[int, int]:
    """The version in the output of `slurmctld -V`: (22, 5) for slurm-wlm 22.05.8."""
    major, minor = answer.split()[1].split(".")[:2]
    return int(major), int(minor)


def write_files(folder: Path, ports: Ports, nodes: int, cpus: int, memory_mb: int, gpus: int, lines: tuple[str, ...],
                version: tuple[int, int]) -> None:
    """Writes slurm.conf, slurmdbd.conf, gres.conf, munge's key, and the database's options and first statements."""
    password = secrets.token_hex(18)
    host = socket.gethostname().split(".")[0]
    slurm = _SLURM.format(
        folder=folder, user=user(), host=host, ports=ports,
        last_port=ports.first + BLOCK - 1, first_client_port=ports.first + 80, memory_of_cpu=memory_mb // cpus,
        # The name of this setting depends on the release.
        preemption="PreemptParameters=send_user_signal" if version >= (24, 5)
        else "SlurmctldParameters=preempt_send_user_signal")
    if gpus:
        slurm += "GresTypes=gpu\nAccountingStorageTRES=gres/gpu\n"
    for number in range(1, nodes + 1):
        slurm += (f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.node(number)} Sockets=1 "
                  f"CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory_mb} {f'Gres=gpu:{gpus}' if gpus else ''}\n")
    files = {
        "slurm.conf": slurm + _PARTITIONS + "\n".join(lines) + "\n",
        "slurmdbd.conf": _ACCOUNTING.format(folder=folder, user=user(), ports=ports, password=password),
        "gres.conf": _gpus(folder, nodes, gpus),
        "database.cnf": _DATABASE.format(folder=folder, user=user(), ports=ports),
        "first.sql": _FIRST_STATEMENTS.format(password=password),
        "munge.key": secrets.token_hex(512),
    }
    for name, text in files.items():
        file = folder / name
        file.touch(mode=0o600)  # slurmdbd and munged refuse files that others can read
        file.write_text(text)


def _gpus(folder: Path, nodes: int, gpus: int) -> str:
    """Makes links to a character device as GPUs. They suffice for scheduling and CUDA_VISIBLE_DEVICES, but not to compute."""
    for number in range(gpus):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    files = "".join(f"NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu{number}\n" for number in range(gpus))
    return "AutoDetect=off\n" + files


_SLURM = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports.controller}
SrunPortRange={first_client_port}-{last_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# cred_expire, in seconds, is also the least time before a requeued job starts again; 5 is the least that is accepted.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
MailProg=/bin/true

# No cgroups, and more CPUs and memory than the machine may have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
DefMemPerCPU={memory_of_cpu}

# Short timeouts. A node is dead if it has not answered for SlurmdTimeout, and then not to a ping for MessageTimeout.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
PriorityType=priority/basic
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=3
KillWait=5
UnkillableStepTimeout=30
InactiveLimit=0
MinJobAge=3600
MaxArraySize=10001
# A node that was down is used again as soon as its slurmd runs.
ReturnToService=2
RebootProgram=/bin/true
JobRequeue=1
# Jobs that no node can run are refused at submission.
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A preempted job gets the signal of its --signal at once, and is ended at the end of the grace time.
{preemption}

JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports.accounting}
# sacct and sacctmgr 22.05 look for munge's socket here.
AccountingStoragePass={folder}/munge.sock
AccountingStoreFlags=job_comment
"""

_PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=30 PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=30 PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
"""

_ACCOUNTING = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports.accounting}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports.database}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""

_DATABASE = """\
[mariadbd]
user={user}
datadir={folder}/database
socket={folder}/database.sock
pid-file={folder}/mariadbd.pid
bind-address=127.0.0.1
port={ports.database}
innodb-buffer-pool-size=64M
innodb-lock-wait-timeout=900
# Waits for no disk: nothing of it outlives the cluster.
debug-no-sync
innodb-flush-method=nosync
innodb-flush-log-at-trx-commit=0
"""

_FIRST_STATEMENTS = """\
ALTER USER 'root'@'localhost' IDENTIFIED BY '{password}';
CREATE DATABASE slurm_acct_db;
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
CREATE USER 'slurm'@'localhost' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';
"""
