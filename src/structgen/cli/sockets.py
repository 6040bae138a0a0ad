"""The sockets of a server, bound and listening before anything large is imported or read.

Holds  a port that another server has is found out at once, and is never shared with it.
Used   by `serve`.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from structgen.cli.failure import CommandError

_BACKLOG = 1024
_OTHER_FILES = 256  # the model's, libraries, event loops, and connections too many, for a moment
_LAST_PORT = 65535


class Listening(NamedTuple):
    """Sockets that listen, and where clients find them."""

    sockets: list[socket.socket]
    url: str

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach them."""
        return all(
            each.family == socket.AF_UNIX or _is_loopback(each.getsockname()[0])
            for each in self.sockets
        )


@contextmanager
def listening(
    host: str, port: int, uds: Path | None, *, scheme: str = "http"
) -> Iterator[Listening]:
    """Listen on a host's addresses, or on a Unix socket; closed, and gone, at the end.

    Raises `CommandError` for what cannot be listened on.
    """
    with ExitStack() as stack:
        if uds is not None:
            yield Listening([stack.enter_context(_unix(uds))], f"unix:{uds}")
            return
        sockets: list[socket.socket] = []
        for family, address in _addresses(host, port):
            # All addresses of a host get the same port, where the system chooses it.
            chosen = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
            sockets.append(stack.enter_context(_tcp(family, chosen, host)))
        named = f"[{host}]" if ":" in host else host
        yield Listening(sockets, f"{scheme}://{named}:{sockets[0].getsockname()[1]}")


def allow(connections: int) -> None:
    """Let this process have so many open connections, each of which is a file to the system.

    Raises `CommandError` where the system does not: one more would be left without an answer.
    """
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise CommandError(
            f"--max-connections {connections}: this process may have {hard} open files, of which "
            f"it needs {_OTHER_FILES} for other things; write at most {hard - _OTHER_FILES}, or "
            "raise `ulimit -n`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _addresses(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    if not 0 <= port <= _LAST_PORT:
        raise CommandError(f"--port {port}: a port is a whole number from 0 to {_LAST_PORT}")
    if not host:
        raise CommandError("--host is empty; write 127.0.0.1, or 0.0.0.0 for all networks")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandError(f"--host {host}: no such host: {reason}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))  # type: ignore[misc]  # addresses of TCP begin with a host and a port


def _tcp(family: int, address: tuple[str, int], host: str) -> socket.socket:
    # With the protocol named, event loops switch off the delay of small packets.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # So that a port can be taken again at once, though old connections linger on it. Two that
        # listen cannot share it by this.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise CommandError(_reason(error, address[1], host)) from None
    return made


def _reason(error: OSError, port: int, host: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} of {host} is in use: another server listens there; stop it, choose "
                "another --port, or --port 0 for one that is free"
            )
        case errno.EADDRNOTAVAIL:
            return f"--host {host}: this machine has no such address; write one that it has"
        case errno.EACCES:
            return f"--port {port}: not allowed to listen there; ports from 1024 on are for all"
        case _:
            return f"cannot listen on {host}, port {port}: {error.strerror or error}"


@contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        try:
            _make_room(path)
            made.bind(os.fspath(path))
            made.listen(_BACKLOG)
        except OSError as error:
            raise CommandError(f"--uds {path}: {error.strerror or error}") from None
        try:
            yield made
        finally:
            path.unlink(missing_ok=True)


def _make_room(path: Path) -> None:
    """Remove a socket that nobody listens on any more; refuse everything else that is there."""
    if not path.parent.is_dir():
        raise CommandError(f"--uds {path}: the folder {path.parent} does not exist; make it")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise CommandError(f"--uds {path}: there is a file that is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise CommandError(
                f"--uds {path} is in use: another server listens there; choose another path"
            )


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
