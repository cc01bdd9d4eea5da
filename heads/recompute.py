"""Activation checkpointing: a part of the network keeps its inputs alone and is computed again
in the backward pass.

Chen et al. 2016 (arXiv 1604.06174), by torch's own non-reentrant checkpoint. The graph is the
same, so losses and gradients are bit for bit those of the plain pass. Costs one more forward
pass of that part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def plainly(part: Callable[..., Any], *args: Any) -> Any:
    """part(*args)."""
    return part(*args)


def recomputed(part: Callable[..., Any], *args: Any) -> Any:
    """part(*args); a backward pass runs it again. It must give the same for the same
    arguments, change none of them, and draw no random numbers."""
    if not torch.is_grad_enabled():
        return part(*args)
    return checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)


@contextlib.contextmanager
def layers_recomputed(model: nn.Module, on: bool = True) -> Iterator[None]:
    """While open, every layer of a transformers `model` keeps its inputs alone; the
    backward pass runs it again with the weights that it has now and the same dropout.
    (transformers' own switch works in training mode alone, where all dropout is on.) on:
    False does nothing."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    before = [layer.__dict__.get("forward") for layer in layers]
    if on and torch.is_grad_enabled():
        for layer in layers:
            layer.forward = functools.partial(_again, layer, layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]


def _again(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    places = [(part._parameters, name) for part in layer.modules() for name in part._parameters]
    # torch.func.functional_call puts others in for a while.
    weights = [held[name] for held, name in places]

    def run(*args: Any, **kwargs: Any) -> Any:
        now = [held[name] for held, name in places]
        for (held, name), weight in zip(places, weights, strict=True):
            held[name] = weight
        try:
            return forward(*args, **kwargs)
        finally:
            for (held, name), weight in zip(places, now, strict=True):
                held[name] = weight

    return checkpoint(run, *args, use_reentrant=False, **kwargs)
