"""Workers that torchrun starts again must not meet at the addresses of those that died.

torchrun keeps one store over all restarts, where the process group of the new workers finds
the keys of the old one: a rank that reads too early connects to a peer that is gone, and waits
for it (pytorch issue 135712). On one node every rank knows which restart it belongs to, so
each restart gets its own prefix. On several nodes the agents may count differently; there
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment gives every restart a new store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

SCHEME = "restarted"


def init_method() -> str | None:
    """What Accelerate should hand on to init_process_group; None, its own way, but for a
    restart on one node.
    """
    env = os.environ
    again = int(env.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    if not (
        again
        and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and env.get("GROUP_WORLD_SIZE") == "1"
    ):
        return None
    with contextlib.suppress(RuntimeError):  # registered already
        register_rendezvous_handler(SCHEME, _meet)
    return f"{SCHEME}://"


def _meet(url: str, **more: Any) -> Iterator[tuple[dist.Store, int, int]]:
    for store, rank, world in rendezvous("env://", **more):
        yield (
            dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
            rank,
            world,
        )
