"""An incarnation: one start of a process that claims, commits or cancels; its file is its token."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import ValidationError

from hpcroll.contract import Record
from hpcroll.errors import CorruptRecordError, SpoolError
from hpcroll.fs import RunPaths, claim_name, probe_filesystem, publish, read_fresh
from hpcroll.spool.pulse import Pulse

if TYPE_CHECKING:
    from hpcroll.spool.spool import Spool

LINKS_PER_TOKEN = 30_000
"""Names after which a token file is followed by a copy: below the least LINK_MAX in use (ext4's 65,000).

Counted here, because SFTP and some NFS servers do not say EMLINK, and `st_nlink` is always 1 on some mounts.
"""


OTHER_ROLE = "other"


class WorkerInfo(Record):
    """Who an incarnation is: the content of its file in workers/, and of every name that it links."""

    SCHEMA: ClassVar[str] = "1.1"

    incarnation: str
    run_id: str
    role: str
    """`worker`, or the command that claims (`cancel`)."""
    leg: str
    rank: int
    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    started_ticks: int | None = None
    """Start of the process in clock ticks since boot: a reused pid is another process. New in 1.1."""
    job_id: str | None = None
    """The Slurm job; None outside of Slurm."""
    restart_count: int = 0
    """How often Slurm had requeued that job."""
    predecessor: str | None = None
    """The incarnation of the same process before this one."""
    token: str
    """Random."""
    started_at: float
    """Unix seconds on its node; for people."""
    final: bool = False
    """Set in the copy that an incarnation links where a rollout ended for all legs."""


class WorkerEnd(Record):
    """Says that an incarnation's process tree is dead."""

    SCHEMA: ClassVar[str] = "1.0"

    incarnation: str
    status: int | None
    """Exit status, negative for a signal; None where nobody knows."""
    ended_at: float


class Incarnation:
    """This process, as others see it. Safe to use from several threads."""

    def __init__(self, paths: RunPaths, info: WorkerInfo, *, beat_s: float) -> None:
        self.paths = paths
        self.info = info
        self.pulse = Pulse(beat_s)
        """When this incarnation's own heartbeats were written."""
        self._beat_s = beat_s
        self._lock = threading.Lock()
        self._tokens = {False: (paths.worker_file(info.incarnation), 0)}
        self._copies = 0

    @classmethod
    def register(cls, spool: Spool, *, leg: str, rank: int, role: str = "worker") -> Self:
        """A new incarnation of the calling process; its file is complete and durable on return.

        Raises `UnsafeFilesystemError` where this node's mount of the run cannot hold a worker's claims: it
        may be another one than the submitter's.
        """
        if role == "worker":
            probe_filesystem(spool.paths.root)
        legs = spool.config.leg_names
        mark = f"l{legs.index(leg)}" if role == "worker" and leg in legs else OTHER_ROLE
        info = _describe(spool.run_id, mark, leg=leg, rank=rank, role=role)
        return cls._publish(spool.paths, info, beat_s=spool.config.lease.beat_s)

    def successor(self) -> Incarnation:
        """A new incarnation of the same process, which may claim what this one wrote records for."""
        old = self.info
        info = _describe(old.run_id, mark_of(old.incarnation), leg=old.leg, rank=old.rank, role=old.role)
        info = info.model_copy(update={"predecessor": self.id})
        return self._publish(self.paths, info, beat_s=self._beat_s)

    @classmethod
    def _publish(cls, paths: RunPaths, info: WorkerInfo, *, beat_s: float) -> Self:
        path = paths.worker_file(info.incarnation)
        if not publish(path, info.to_json().encode()):
            raise SpoolError(f"{path} exists already; two processes drew one random name: start again")
        return cls(paths, info, beat_s=beat_s)

    @property
    def id(self) -> str:
        return self.info.incarnation

    @property
    def leg(self) -> str:
        return self.info.leg

    @property
    def host(self) -> str:
        return self.info.host

    @property
    def job_id(self) -> str | None:
        return self.info.job_id

    @property
    def token_file(self) -> Path:
        """The file that claims are linked to just now."""
        return self._tokens[False][0]

    def claim(self, name: Path, *, final: bool = False) -> bool:
        """Claims `name` for this incarnation; True where it is ours. Raises like `fs.claim_name`."""
        return claim_name(self._token(final), name)

    def _token(self, final: bool) -> Path:
        with self._lock:
            path, used = self._tokens.get(final, (None, 0))
            if path is None or used >= LINKS_PER_TOKEN:
                path, used = self._copy(final), 0
            self._tokens[final] = (path, used + 1)
            return path

    def _copy(self, final: bool) -> Path:
        self._copies += 1
        path = self.paths.token_copy(self.id, self._copies, final=final)
        publish(path, self.info.model_copy(update={"final": final}).to_json().encode())
        return path


def mark_ended(paths: RunPaths, incarnation: str, *, status: int | None = None) -> None:
    """Says that the process tree of `incarnation` is dead, so that its rollouts are taken over at once.

    For its parent, or for itself as its very last act. The first word stays.
    """
    end = WorkerEnd(incarnation=incarnation, status=status, ended_at=time.time())
    publish(paths.ended_file(incarnation), end.to_json().encode())


def read_worker(path: Path) -> WorkerInfo | None:
    """The incarnation that `path` (its file, or any name that it linked) belongs to; None where absent.

    Raises `CorruptRecordError` where the name holds something else.
    """
    data = read_fresh(path)
    if data is None:
        return None
    try:
        return WorkerInfo.from_json(data)
    except ValidationError as error:
        raise CorruptRecordError(f"{path} is not a worker's token: {error}") from error


def started_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None where it is gone (or a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def mark_of(incarnation: str) -> str:
    """`l<index of its leg>` of a worker, else `OTHER_ROLE`: who it works with, read from its name alone."""
    parts = incarnation.rsplit("-", 2)
    return parts[1] if len(parts) == 3 else OTHER_ROLE


def _describe(
    run_id: str, mark: str, *, leg: str, rank: int, role: str, environ: Mapping[str, str] = os.environ
) -> WorkerInfo:
    host = socket.gethostname()
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return WorkerInfo(
        # Readable in a listing; no dots, which part the name from its suffix.
        incarnation=f"{re.sub(r'[^A-Za-z0-9-]', '-', host)[:40]}-r{rank}-{mark}-{secrets.token_hex(6)}",
        run_id=run_id,
        role=role,
        leg=leg,
        rank=rank,
        host=host,
        pid=os.getpid(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        started_ticks=started_ticks(os.getpid()),
        job_id=environ.get("SLURM_JOB_ID"),
        restart_count=int(restarts) if restarts.isdecimal() else 0,
        token=secrets.token_hex(16),
        started_at=time.time(),
    )
