"""head.layer=target: EAGLE with the target's own layer class, exact where it works and refused
in words where not.

pytest tests/test_eagle_own.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from decode.target import Target
from heads import HEADS, load_head, parity, save_head
from heads.eagle.config import EagleConfig
from heads.eagle.head import Eagle1Head, Eagle3Head, EagleHead
from tests.archs import VOCAB, build
from tests.test_eagle import batch_of, head_of

WORKS = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "granite",
    "phi3",
    "gpt_neox",
    "mixtral",
]
REFUSED = {
    "gpt2": "rotary positions",
    "olmo2": "does not norm its input",
    "gemma2": "caps its attention scores",
    "bloom": "no layers with rotary",
    "opt": "rotary positions",
    "cohere": "does not take",
}


@pytest.mark.parametrize("arch", WORKS)
def test_trains_saves_loads_and_decodes_as_it_trained(arch: str, tmp_path: Path) -> None:
    target = Target(build(arch))
    for kind in ("eagle3", "eagle1") if arch == "qwen3" else ("eagle3",):
        head = head_of(
            target, kind=kind, layer="target", steps=2, depth=3, layers=2 if arch == "llama" else 1
        )
        out = head(batch_of([12, 9]), target)
        out.sum.backward()
        assert bool(out.sum.isfinite())
        grads = {n: p.grad for n, p in head.named_parameters()}
        assert all(g is not None and bool(g.isfinite().all()) for g in grads.values())
        save_head(head, tmp_path / kind, None)
        again = load_head(tmp_path / kind, target)
        found = parity.check(
            head, target, [[5, 9, 7], [11, 4]], 10, reload=lambda again=again: again
        )
        assert (
            found.passed and found.identical and max(most for _, most in found.distance) < 1e-5
        ), found.problems


@pytest.mark.parametrize(("arch", "why"), REFUSED.items())
def test_refused_in_words(arch: str, why: str) -> None:
    with pytest.raises(UserError, match=f"head.layer: target; .*{why}.*; use head.layer=llama"):
        Eagle3Head.for_target(
            Target(build(arch)), EagleConfig(layer="target", draft_vocab=0, taps=[1, 1, 1])
        )


@pytest.mark.parametrize("kind", [Eagle3Head, Eagle1Head])
def test_a_llama_targets_own_layer_is_the_default_layer(kind: type[EagleHead]) -> None:
    """Same weights, same loss and gradients, whichever way the layer is built."""
    target, counts = Target(build("llama", torch.float64)), torch.arange(VOCAB) + 1
    cfg = {
        "kind": kind.kind,
        "draft_vocab": 0,
        "taps": [1, 1, 1] if kind is Eagle3Head else [],
        "layers": 2,
    }
    mine, own = (
        HEADS[kind.kind].for_target(target, EagleConfig(layer=layer, **cfg), counts).double()  # type: ignore[arg-type]
        for layer in ("llama", "target")
    )
    with torch.no_grad():
        for name, weight in own.named_parameters():
            if weight.dim() > 1 or "norm" in name:
                torch.nn.init.normal_(weight, 0.3, 0.3)
            mine.get_parameter(name.replace(".inner.", ".")).copy_(weight)
    batch, sums = batch_of([12, 9]), []
    for head in (mine, own):
        sums.append(head(batch, target).sum)
        sums[-1].backward()
    torch.testing.assert_close(*sums, rtol=1e-5, atol=0)  # transformers' norms go through float32
    for name, weight in own.named_parameters():
        want = mine.get_parameter(name.replace(".inner.", ".")).grad
        assert want is not None and weight.grad is not None
        torch.testing.assert_close(
            weight.grad, want, rtol=1e-3, atol=1e-5 * float(want.abs().max())
        )


def test_starts_from_a_layer_of_the_target_with_all_its_parts() -> None:
    target = Target(build("qwen3", num_hidden_layers=3))
    cfg = EagleConfig(
        layer="target", init="layer", init_layer=-1, draft_vocab=0, taps=[1, 1, 2], layers=2
    )
    head = Eagle3Head.for_target(target, cfg)
    given, first, second = target.model.base_model.layers[2], head.net.layers[0], head.net.layers[1]
    assert torch.equal(first.inner.self_attn.q_proj.weight[:, 32:], given.self_attn.q_proj.weight)  # type: ignore
    assert not bool(first.inner.self_attn.q_proj.weight[:, :32].any())  # type: ignore
    assert torch.equal(first.inner.self_attn.q_norm.weight, given.self_attn.q_norm.weight)  # type: ignore
    assert torch.equal(second.input_layernorm.weight, given.input_layernorm.weight)  # type: ignore
    with torch.no_grad():
        assert bool(head(batch_of([10]), target).sum.isfinite())


def test_a_fresh_norm_that_stores_its_weight_minus_one_stays_one() -> None:
    cfg = EagleConfig(layer="target", draft_vocab=0, taps=[1, 1, 1])
    head = Eagle3Head.for_target(Target(build("gemma3_text")), cfg)
    norms = [p for n, p in head.net.layers.named_parameters() if "norm" in n]
    assert norms and not any(bool(p.any()) for p in norms)
