"""What stands in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.decode import graphs
from outrider.decode.graphs import Found, Way


def standing_in(monkeypatch: pytest.MonkeyPatch, recorded: bool = False) -> None:
    """Let passes of any dtype on a CPU go through graphs, which run the captured function again;
    recorded: the operations alone that it once called, not the code around them, which takes
    longer to capture."""

    def captured(
        way: Way, held: Sequence[Tensor], place: Any
    ) -> tuple[Callable[[], None], Found, tuple[None, None]]:
        again = make_fx(way)(*held) if recorded else way
        found = tuple(None if t is None else t.clone() for t in again(*held))

        def replay() -> None:
            for to, new in zip(found, again(*held), strict=True):
                if to is not None:
                    to.copy_(new)

        return replay, found, (None, None)

    monkeypatch.setattr(graphs, "takes", lambda *_: True)
    monkeypatch.setattr(graphs, "captured", captured)
