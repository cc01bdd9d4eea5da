"""What a pass would hold of a device that is not here: torch's meta tensors know shape and type
and no number.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MOVES = ("_to_copy", "copy_")


class Held(TorchDispatchMode):
    """Counts the storages that operations on the meta device make, from their making until
    nobody holds them. now, peak: bytes. largest: bytes of the largest storage. seen: names of
    the operations. mixed: those that were given tensors of two devices, as no GPU takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.seen: set[str] = set()
        self.mixed: set[str] = set()
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        places = {t.device.type for t in given if t.dim() or t.is_meta}
        if len(places) > 1 and name not in MOVES:
            self.mixed.add(name)
        out = func(*args, **(kwargs or {}))
        self.seen.add(name)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._hold(tensor)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = size
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._known.pop(key)
