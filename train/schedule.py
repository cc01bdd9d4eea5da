"""The learning rate as a function of the step, and how many steps fit into `minutes`."""

from __future__ import annotations

import math

from outrider.train.config import OptimConfig


def learning_rate(step: int, steps: int, cfg: OptimConfig) -> float:
    """Return the rate of update number `step` (0-based) of `steps`: linear warm-up, then
    cosine, linear or constant."""
    assert cfg.lr is not None, "chosen by the target's width before"
    warm = round(cfg.warmup * steps)
    if step < warm:
        return cfg.lr * (step + 1) / (warm + 1)
    done = (step - warm) / max(1, steps - 1 - warm)
    if cfg.schedule == "constant":
        return cfg.lr
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr * (cfg.final + (1 - cfg.final) * shape)


def planned_steps(done: int, seconds: float, steps: int, minutes: float) -> int:
    """Return the steps of a run: `steps`, or with `minutes` (0 = no limit) at most as many
    as fit in at the pace of the first `done`, which took `seconds`."""
    if not minutes or not seconds or done < 1:
        return steps
    return max(done + 1, min(steps, int(60 * minutes * done / seconds)))


def over(done: int, seconds: float, minutes: float) -> bool:
    """Return whether `minutes` hold no step beside the first `done`, which took `seconds`,
    and the one behind them."""
    return bool(minutes and done > 0) and seconds * (done + 2) / done > 60 * minutes


def usual_rate(width: int, narrows: bool = True) -> float:
    """Return the peak rate where nobody gives one, for a target of that width, to two digits.

    A layer under AdamW wants its rate as 1 / width (Yang et al. 2022, "Tensor Programs V"),
    and 1e-3 was found at 576. That is 1.4e-4 at 4,096, where EAGLE heads are trained with
    5e-5 to 2e-4. narrows: False for heads that start as the target's own and whose authors
    keep 1e-3 at 4,096 (Medusa).
    """
    return float(f"{1e-3 * min(1.0, 576 / width):.2g}") if narrows else 1e-3
