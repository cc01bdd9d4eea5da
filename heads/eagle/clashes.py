"""Keys of EAGLE heads that do not go together."""

from __future__ import annotations

from typing import Any


def problems(cfg: Any) -> list[str]:
    """What is wrong with an EagleConfig as a whole, as "key: value; rule; fix"."""
    found = []
    only3 = [
        k
        for k in (
            "taps",
            "parallel",
            "norm_before_fc",
            "norm_output",
            "norm_joined",
            "norm_before_residual",
        )
        if getattr(cfg, k)
    ]
    if cfg.kind == "eagle1" and only3:
        found += [f"{key}: belongs to eagle3; leave it out, or use head=eagle3" for key in only3]
    if cfg.parallel and cfg.steps < 2:
        found.append("steps: 1, but a parallel head's mask is read from the second on; set 2")
    longest = max(cfg.steps, cfg.depth)
    if cfg.sliding_window is not None and cfg.sliding_window <= longest:
        found.append(
            f"sliding_window: {cfg.sliding_window} leaves a draft of {longest} steps nothing "
            f"of the text; give more than {longest}, or null for all of it"
        )
    if cfg.mask_token >= 0 and not cfg.parallel:
        found.append("mask_token: nothing reads a mask; set parallel=true, or mask_token=-1")
    if cfg.parallel and cfg.norm_output:
        found.append("norm_output: with parallel=true no output is handed on; leave it out")
    if cfg.kind == "eagle3" and cfg.fc_bias:
        found.append("fc_bias: belongs to eagle1; leave it out, or use head=eagle1")
    if cfg.norm_joined and cfg.norm_before_fc:
        found.append("norm_joined: norm_before_fc norms the features already; use one of the two")
    if cfg.kind == "eagle3" and cfg.feature_loss:
        found.append(
            "feature_loss: EAGLE-3 has no feature of the target to match; use 0, or head=eagle1"
        )
    return found
