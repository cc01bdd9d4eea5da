"""Python reads this file at its start when this folder is on PYTHONPATH: no process of the
tests connects beyond loopback.

Every attempt (connect, sendto, name look-up) raises Blocked and is noted in the file that
OUTRIDER_NET_LOG names, so that a library which swallows the error is caught as well. pip alone
is let through: it talks to the package index.

The hook sees what Python's socket module does, not programs and libraries with sockets of their
own.
"""

import importlib.machinery
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOG = "OUTRIDER_NET_LOG"


class Blocked(OSError):
    """A connection beyond this machine."""


def is_local(host):
    """Whether a host of a socket call is this machine: loopback, empty, or its own name."""
    if host is None or host == "":
        return True
    name = host.decode(errors="replace") if isinstance(host, bytes | bytearray) else str(host)
    name = name.partition("%")[0].lower()
    return name in ("localhost", "::1", "::ffff:127.0.0.1", os.uname().nodename.lower()) or (
        name.startswith("127.") and name.replace(".", "").isdigit()
    )


def is_number(host):
    """Whether a host is an address already, so that looking it up asks nobody."""
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    return ":" in name or name.replace(".", "").isdigit()


def judge(event, args):
    """The host that a socket event would reach beyond this machine; None when it stays here."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = args[1]
        if not isinstance(address, tuple) or not address:
            return None  # a unix socket, or one that is connected already
        return (
            None
            if is_local(address[0]) or address[0] == "0.0.0.0"
            else f"{address[0]}:{address[1]}"
        )
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        return None if is_local(args[0]) or is_number(args[0]) else str(args[0])
    return None


def is_pip(argv):
    """Whether this process is `python -m pip ...`, or one that pip started to build a package."""
    named = "-m" in argv and argv[argv.index("-m") + 1 : argv.index("-m") + 2] == ["pip"]
    return named or "PIP_BUILD_TRACKER" in os.environ


def hook(event, args):
    if not event.startswith("socket."):
        return
    where = judge(event, args)
    if where is None:
        return
    command = " ".join(map(str, getattr(sys, "orig_argv", sys.argv)))[:300].replace("\n", " ")
    line = f"{event} {where} by process {os.getpid()} ({command})"
    if path := os.environ.get(LOG):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(handle, line.encode(errors="replace") + b"\n")
        os.close(handle)
    raise Blocked(f"tests: no network beyond loopback: {line}")


def install():
    """Guard this process, once."""
    if not getattr(sys, "_outrider_guarded", False) and not is_pip(
        getattr(sys, "orig_argv", sys.argv)
    ):
        sys._outrider_guarded = True
        sys.addaudithook(hook)


def next_one():
    """Run the sitecustomize that this file stands in front of, if there is one."""
    path = [p for p in sys.path if Path(p or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    import importlib.util

    install()
    next_one()
