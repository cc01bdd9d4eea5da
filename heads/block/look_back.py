"""Where the attention of a fresh block head looks: back.

A mask must find the anchor and the newest feature before it can guess better than by
frequency, and random attention spreads over the whole text. Here head d starts by reading what
stands d positions before, as far as rotary positions tell it apart; training goes on from
there. Nothing is added to the network: it is one direction that all keys share.

Shape letters: D width, N positions, F taps, H query heads, G key heads, h half a head's size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.heads.block.net import BlockNet

SLOWEST = 0.04  # radians a position: slower pairs cannot tell neighbours apart
SHARP = 2.0  # of the queries' norm


@torch.no_grad()
def look_back(net: BlockNet, feats: Tensor, embedded: Tensor) -> None:
    """Change random weights in place. feats: [N, F, D] of some text. embedded: [N, D] rows of
    the target's table."""
    config, mask = net.config, F.normalize(net.mask, dim=0)
    shared = F.normalize(torch.randn_like(mask), dim=0)
    scaled = (feats / net.scale).flatten(1)
    size = net.fc(scaled).norm(dim=-1).mean()
    net.fc.weight += size * torch.outer(shared, reading(scaled.mean(0)))
    c = net.fuse(feats)
    share = float((c @ shared).mean() / c.shape[1] ** 0.5)
    rows = F.rms_norm(embedded, (embedded.shape[1],))
    heads, groups = config.num_attention_heads, int(config.num_key_value_heads or 1)
    cos, sin = (t[1].double() for t in net.rope(2, torch.float64, net.mask.device))
    turn = torch.atan2(sin, cos)[: len(cos) // 2]  # radians of a position, [h]
    back = torch.arange(1, heads + 1, device=turn.device)
    for layer in net.layers:
        part: Any = layer
        spread = float(part.k_proj.weight.std())
        angle = torch.rand(groups, len(turn)).to(turn) * 2 * torch.pi
        key = torch.polar((turn > SLOWEST).double() + 0 * angle, angle)
        key = key / key.abs().square().mean().clamp(min=1e-9).sqrt() / 2**0.5
        ahead = key.repeat_interleave(heads // groups, 0) * torch.exp(-1j * back[:, None] * turn)
        wide, near = (
            torch.cat([z.real, z.imag], -1).flatten().to(net.mask) * spread for z in (key, ahead)
        )
        part.k_proj.weight += torch.outer(wide, shared) / max(share, 0.1)
        part.k_proj.weight += torch.outer(wide, reading(rows.mean(0))) * rows.shape[1] ** 0.5
        part.k_proj.weight -= torch.outer(part.k_proj.weight @ mask, mask)
        part.q_proj.weight += torch.outer(near - part.q_proj.weight @ mask, mask)
        part.q_norm.weight.fill_(SHARP)


def reading(mean: Tensor) -> Tensor:
    """The weights [n] that read 1 off a vector [n]."""
    return mean / mean.square().sum().clamp(min=1e-9)
