"""Activation checkpointing: a part of the network keeps its inputs alone and is computed again in the backward pass.

Chen et al. 2016 (arXiv 1604.06174), by torch's own non-reentrant checkpoint. The graph is the same, so losses and
gradients are bit for bit those of the plain pass. Costs one more forward pass of that part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def plainly(part: Callable[..., Any], *args: Any) -> Any:
    """part(*args)."""
    return part(*args)


def recomputed(part: Callable[..., Any], *args: Any) -> Any:
    """part(*args); a backward pass runs it again. It must give the same for the same arguments, change none of them,
    and draw no random numbers."""
    if not torch.is_grad_enabled():
        return part(*args)
    return checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)
