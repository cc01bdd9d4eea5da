"""Running servers as drafters: NAME@http://HOST:PORT."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

SERVER = re.compile(r"([\w.+-]+)@(https?://\S+)")  # a running one, by a name for it


def wrong_address(name: str) -> str:
    """What is wrong with the address of a running server, "" for a sound one and for any other
    name. What may be a password is not told, for it would be printed."""
    server = SERVER.fullmatch(name)
    if server is None:
        return ""
    try:
        parts = urlsplit(server[2])
        sound = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        sound = False
    if sound and "@" not in parts.netloc and not parts.query and not parts.fragment:
        return ""
    return (
        f"{server[1]}@: its address is no address of a server; write {server[1]}@http://HOST:PORT"
    )
