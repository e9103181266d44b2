"""The few Linux calls that Python 3.11 has no name for."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 0x2, 0x4, 0x8, 0x1000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_NS_GET_USERNS = 0xB701
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_CAPABILITY_VERSION_3 = 0x20080522

# Loaded here and not at first use: later the process sees the image's files, not the node's.
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def setns(fd: int, what: str) -> None:
    """Enters the namespace behind `fd`; `what` names it in the error."""
    _check(_libc.setns(fd, 0), f"cannot enter the sandbox's {what} namespace")


def unshare(flags: int, what: str) -> None:
    _check(_libc.unshare(flags), f"cannot make a {what} namespace")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )
    _check(result, f"cannot mount {kind or source} on {target}")


def owner_of(ns_fd: int) -> int:
    """A descriptor of the user namespace that owns the namespace behind `ns_fd`."""
    return fcntl.ioctl(ns_fd, _NS_GET_USERNS)


def die_with_parent(signal_number: int) -> None:
    """Asks for `signal_number` once the parent is gone, even where it was killed."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl(PDEATHSIG)")


def hide_memory(hidden: bool = True) -> None:
    """No payload may read or trace this process; it cannot write to its own `/proc` files either."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0 if hidden else 1, 0, 0, 0), "prctl(DUMPABLE)")


def adopt_orphans() -> None:
    """Orphans among the descendants become children of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(CHILD_SUBREAPER)")


def drop_privileges(keep: frozenset[int] = frozenset()) -> None:
    """Only the capabilities `keep` can be had from here on, and no set-uid program gives more."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        # Fails past the kernel's last capability, and where it is dropped already.
        if capability not in keep and _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            continue
    mask = sum(1 << capability for capability in keep)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable; nothing is inheritable: an exec as root takes the bounding set.
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    _check(_libc.capset(header, data), "capset")


def raise_loopback() -> None:
    """Brings `lo` up in the network namespace of this process."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack_from("16sH", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        if not flags & _IFF_UP:
            fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))


def pid_namespace(pid: int | str) -> int | None:
    """The inode number of the pid namespace of `pid`, None where the process is gone."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None
