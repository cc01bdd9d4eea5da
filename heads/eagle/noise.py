"""Noise on the features that EAGLE-1 learns from.

Shape letters: as in heads/eagle/head.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.heads.batch import Batch, hash_u63


def feature_noise(batch: Batch, g: Tensor, step: int, spread: float) -> Tensor:
    """Uniform noise (u - 1/2) * spread * 512 / T per sample (EAGLE-1). Drawn from the step's
    and the sample's number: new at every update, the same on any number of ranks and after
    a resume. The device draws it: other devices, other numbers."""
    out = torch.zeros(g.shape, dtype=torch.float32, device=g.device)
    generator = torch.Generator(device=g.device)
    for sample, (b, start, size) in zip(batch.sample_ids.tolist(), batch.spans(), strict=True):
        generator.manual_seed(hash_u63(step, sample))
        drawn = torch.rand(size, g.shape[-1], generator=generator, device=g.device) - 0.5
        out[b, start : start + size] = drawn * (spread * 512 / size)
    return out.to(g)
