"""EAGLE heads learn what decoding then finds; their files, vocabulary, gradients and
configuration.

pytest tests/heads/test_eagle_learning.py
"""

from __future__ import annotations

import pytest
import torch

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.stats import accepted_length
from outrider.decode.target import Target
from outrider.heads.batch import Batch
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.layers.shape import LayerKeys, layer_config
from outrider.heads.losses import LossWeights
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from tests.heads.test_eagle import GREEDY, batch_of, head_of, target_of


def one_sample(target: Target, length: int = 40) -> Batch:
    """A prompt and the target's own greedy answer."""
    run = generate(target, NoDraft(), [Request([5, 9, 7], length)], GREEDY, eos_ids=())
    ids = torch.tensor([[5, 9, 7, *run.generations[0].token_ids]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Batch(ids, mask, mask & (torch.arange(ids.shape[1]) >= 3), torch.tensor([0]))


@pytest.mark.parametrize("kind, shape", [("eagle3", "tree"), ("eagle1", "chain")])
def test_overfitting_one_sample_shows_in_decoding(kind: str, shape: str) -> None:
    """The test against "98 % in training, 10 % when decoded": after learning one answer by
    heart, the real engine accepts nearly every draft of it."""
    target = target_of()
    batch = one_sample(target)
    torch.manual_seed(0)
    cfg = EagleConfig(
        kind=kind,
        draft_vocab=0,
        taps=[1, 1, 1] if kind == "eagle3" else [],
        steps=4,
        depth=4,
        nodes=8,
        width=2,
        loss=LossWeights(hard=1.0),
    )
    head = head_class(kind).for_target(target, cfg)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=1e-2 if kind == "eagle3" else 5e-3, weight_decay=0.0
    )
    for _ in range(150):
        out = head(batch, target)
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
    drafter = head.drafter(target, DraftSpec(shape=shape))
    run = generate(target, drafter, [Request([5, 9, 7], 40)], GREEDY, eos_ids=())
    assert run.generations[0].token_ids == batch.ids[0, 3:].tolist()
    found = accepted_length([[c for c in run.generations[0].cycles if not c.cut]])
    assert found.mean > 4.5, (found.mean, {k: (v[0] / v[1]).item() for k, v in out.stats.items()})
    head.calibrate([batch], target)
    assert min(a[0] for a in head.calibration["acceptance"]) > 0.85  # the last rows end early


def test_fresh_final_norm_and_scale_are_the_targets() -> None:
    """Gemma stores norm weights minus one, Granite and Cohere scale their logits: both end up
    in the fresh head.
    """
    for arch in ("gemma2", "granite", "cohere"):
        target = target_of(arch)
        with torch.no_grad():
            target.model.base_model.norm.weight.uniform_(0.5, 1.5)
        head = Eagle3Head.for_target(target, EagleConfig(draft_vocab=0, taps=[1, 1, 1]))
        x = torch.randn(3, 32)
        if arch != "cohere":  # Cohere's norm also takes off the mean
            ratio = head.net.norm(x) / target.model.base_model.norm(x)
            torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3, atol=1e-3)
        both = (head.net.lm_head.weight * head.net.norm.weight).detach()
        assert float(both.square().sum(1).mean().sqrt()) <= 1.501
        scale = {"gemma2": 1.0, "granite": 0.25, "cohere": 0.0625}[arch]
        torch.testing.assert_close(head.net.lm_head.weight, target.lm_head_weight * scale)


def test_the_layer_takes_after_the_target() -> None:
    """FIELD 2.7: heads, groups, head size, rotary base and scaling, width, activation,
    epsilon.
    """
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = target_of("llama", head_dim=12, rope_parameters=rope, rms_norm_eps=1e-4)
    shape = layer_config(target, 1, LayerKeys())
    assert shape["head_dim"] == 12 and shape["num_key_value_heads"] == 2
    assert shape["rms_norm_eps"] == 1e-4
    assert shape["rope_parameters"] == rope and shape["intermediate_size"] == 48
    gemma = layer_config(target_of("gemma3_text"), 1, LayerKeys())
    assert gemma["hidden_act"] == "silu" and gemma["rope_parameters"]["rope_theta"] == 1e6
    assert layer_config(target_of("gpt2"), 1, LayerKeys())["intermediate_size"] == 128
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5]}
    rope |= {"long_factor": [2.0, 3.0], "partial_rotary_factor": 0.5}
    rope |= {"original_max_position_embeddings": 64}
    phi = target_of("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    plain = {"rope_type": "default", "rope_theta": 1e4}  # Phi-4-mini turns a part of each head
    assert layer_config(phi, 1, LayerKeys())["rope_parameters"] == plain
    assert bool(head_of(phi)(batch_of([9]), phi).sum.isfinite())
    nested = target_of("llama")  # Gemma 3n says a size for every layer
    vars(nested.model.config)["intermediate_size"] = [48, 64]
    assert layer_config(nested, 1, LayerKeys())["intermediate_size"] == 64
