"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from train.config import OptimConfig


def learning_rate(step: int, steps: int, cfg: OptimConfig) -> float:
    """Rate of update number `step` (0-based) of `steps`: linear warm-up, then cosine, linear
    or constant.
    """
    warm = round(cfg.warmup * steps)
    if step < warm:
        return cfg.lr * (step + 1) / (warm + 1)
    done = (step - warm) / max(1, steps - 1 - warm)
    if cfg.schedule == "constant":
        return cfg.lr
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr * (cfg.final + (1 - cfg.final) * shape)
