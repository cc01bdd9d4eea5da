"""Medusa and Hydra heads: what they learn and draft, by their definitions."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outrider.heads.losses import LossWeights
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.medusa.hydra_heads import HydraHeadsConfig
from outrider.heads.registry import head_class
from tests.helpers.training import random_batch, tiny_target

CASES = {
    "one-block": HydraHeadsConfig(heads=3, blocks=1, draft_vocab=0),
    "three-blocks": HydraHeadsConfig(heads=3, blocks=3, draft_vocab=0, share_lm_head=True),
    "prefix": HydraHeadsConfig(heads=3, blocks=2, prefix_layers=2, draft_vocab=0),
    "medusa": MedusaConfig(heads=3, draft_vocab=0),
    "markov": MedusaConfig(heads=3, draft_vocab=0, markov_rank=8),
}
each = pytest.mark.parametrize("cfg", CASES.values(), ids=CASES.keys())


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def fresh(target, cfg):
    torch.manual_seed(0)
    return head_class(cfg.kind).for_target(target, cfg, torch.arange(target.vocab_size) + 1)


def trained_like(target, cfg, seed=0):
    """A head whose weights are no longer those of the start."""
    head = fresh(target, cfg)
    torch.manual_seed(seed)
    for p in head.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return head


def by_prefix(head, feats: torch.Tensor) -> torch.Tensor:
    """What the heads read of one row's features [T, D]: with prefix layers, transformers' own
    layers on top.
    """
    if getattr(head, "prefix", None) is None:
        return feats
    config = copy.deepcopy(head.prefix.config)
    config._attn_implementation = "eager"
    size = len(feats)
    rope = LlamaRotaryEmbedding(config)(feats, torch.arange(size)[None])
    future = torch.full((size, size), -torch.inf).triu(1)[None, None]
    x = feats[None]
    for i, mine in enumerate(head.prefix.layers):
        layer = LlamaDecoderLayer(config, i)
        layer.load_state_dict(mine.state_dict())
        out = layer(x, attention_mask=future, position_embeddings=rope)
        x = (out[0] if isinstance(out, tuple) else out).view_as(x)
    return x[0].detach()


def logits_by_hand(head, target, i: int, f: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Head i's logits from the feature f = f_t and tokens t + 1 .. t + i + 1, by the
    definition.
    """
    assert len(tokens) == i + 1
    table = target.model.get_input_embeddings().weight
    if head.kind == "medusa":
        h = f + F.silu(head.block_weight[i, 0] @ f + head.block_bias[i, 0])
        extra = head.markov_out @ head.markov_in[tokens[-1]] if head.cfg.markov_rank else 0
        return head.proj[i] @ h + extra
    scale = table[:4096].square().mean().rsqrt()
    c, width = torch.cat([f, *(table[t] * scale for t in tokens)]), len(f)
    h = head.enter[i][:width] @ c + F.silu(head.enter[i][width:] @ c + head.enter_bias[i])
    for layer in range(head.cfg.blocks - 1):
        h = h + F.silu(head.block_weight[i, layer] @ h + head.block_bias[i, layer])
    return (target.lm_head_weight if head.proj is None else head.proj[i]) @ h


@each
def test_loss_follows_the_definition(target, cfg) -> None:
    """Head i reads f_t and e_{t+1} .. e_{t+i+1} and predicts x_{t+i+2}, supervised by that
    token's own mask.
    """
    terms, batch = LossWeights(0.3, 0.7), random_batch()
    head = trained_like(target, dataclasses.replace(cfg, loss=terms, decay=0.5, chunk=4))
    feats = target.features(batch.ids, batch.mask, head.taps)[:, :, 0]
    feats = torch.stack([by_prefix(head, f) for f in feats])
    distributions = target.model(batch.ids).logits.log_softmax(-1)
    want, supervised = 0.0, batch.loss_mask.nonzero().tolist()
    for b, s in supervised:
        for i in range(min(3, s - 1)):
            t = s - i - 2
            tokens = batch.ids[b, t + 1 : s].tolist()
            z = logits_by_hand(head, target, i, feats[b, t], tokens).log_softmax(-1)
            loss = -0.3 * z[batch.ids[b, s]] - 0.7 * (distributions[b, s - 1].exp() * z).sum()
            want += 0.5**i * loss.item()
    out = head(batch, target)
    assert out.count == len(supervised) and out.sum.item() == pytest.approx(want, rel=1e-4)
