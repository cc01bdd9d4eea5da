"""What heads share that run decoder layers of their own on tapped features of the target:
EAGLE (heads/eagle/) and block heads (heads/block/).

Shape letters: T positions of all rows, n predicted tokens, D width, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from outrider.decode.target import Target
from outrider.heads import shapes, vocab
from outrider.heads.base import TAPS, Head
from outrider.heads.config import MOST_DEPTH
from outrider.heads.layers import mask, pieces
from outrider.heads.layers.layer import RMSNorm
from outrider.heads.layers.shape import LayerShape, as_made, layer_config
from outrider.heads.saved import Saved
from outrider.heads.teacher import TeacherFn, target_distribution


@dataclass(kw_only=True)
class LayeredSaved(Saved):
    """What head.json says of it. layer: shape of the draft layers. final: number of the
    target's hidden state behind its final norm. reads_table: embeddings are the table's rows."""

    config: Any
    layer: LayerShape
    vocab_size: int
    taps: list[int]
    final: int
    tap_convention: str = ""
    reads_table: bool = True

    def fits(self, target: Target) -> list[str]:
        deep, size = target.num_layers, self.config.draft_vocab or self.vocab_size
        found = vocab.problems(self.vocab_size, self.config.draft_vocab, target.vocab_size)
        found = found or shapes.problems(self.calibration, MOST_DEPTH, size)
        found += self.layer.fits(target, self.config.layers, "layer")
        if self.final != deep:
            found.append(f"final: {self.final}, the target has {deep} layers")
        return found


class LayeredHead(Head):
    """net: the network, a `Net`, with the transformers config of its layers. taps: what it
    reads. final: number of the target's last hidden state. Embeddings are rows of the
    target's table, as engines have them."""

    Net: ClassVar[type[Any]]
    Saved: ClassVar[type[LayeredSaved]] = LayeredSaved
    mask_name: ClassVar[str] = "mask"  # of the mask's embedding in the network
    net: Any

    def __init__(
        self, cfg: Any, layer: dict[str, Any], taps: tuple[int, ...], vocab_size: int, final: int
    ) -> None:
        """With weights that mean nothing yet. layer: keys of a LlamaConfig, which hold
        whatever `cfg` says of them."""
        cfg = as_made(cfg, layer)
        super().__init__(replace(cfg, mask_token=-1) if cfg.mask_token is None else cfg)
        self.net = self.Net(cfg, layer, len(taps), vocab_size)
        self.taps, self.vocab_size, self.final = taps, vocab_size, final
        if cfg.draft_vocab:
            self.d2t = torch.zeros(cfg.draft_vocab, dtype=torch.int64)

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        taps = tuple(known.taps)
        return cls(known.config, asdict(known.layer), taps, known.vocab_size, known.final)

    def config_json(self) -> dict[str, Any]:
        config = self.net.config
        layer = {k: getattr(config, k) for k in LayerShape.__dataclass_fields__}
        return {
            **super().config_json(),
            "layer": {**layer, "rope_parameters": dict(config.rope_parameters or {})},
            "vocab_size": self.vocab_size,
            "taps": list(self.taps),
            "tap_convention": TAPS,
            "final": self.final,
            "reads_table": True,
        }

    def compiles(self) -> list[tuple[Any, str]]:
        return [(pieces, name) for name in pieces.NAMES]

    def projection(self, target: Target) -> Tensor:
        """[Vd, D] the weight that turns what the network gives into draft logits: its own LM
        head, or the target's, frozen."""
        own = getattr(self.net, "lm_head", None)
        if own is None:
            return self.scaled_rows(target)
        return own.weight  # type: ignore[no-any-return]

    @classmethod
    def completed(cls, cfg: Any, target: Target, counts: Tensor | None = None) -> Any:
        if cfg.mask_token is None:
            cfg = replace(cfg, mask_token=mask.chosen(target, counts) if cfg.masked else -1)
        return as_made(cfg, layer_config(target, cfg.layers, cfg))

    @classmethod
    def for_target(cls, target: Target, cfg: Any, counts: Tensor | None = None) -> Self:
        """Make a fresh head. Raises UserError for taps that the target does not have, a mask
        token that means something, or a draft vocabulary larger than the tokens seen."""
        cfg, taps = cls.completed(cfg, target, counts), cls.choose_taps(target, cfg)
        if cfg.mask_token >= 0:
            mask.check(cfg.mask_token, target, counts)
        layer = layer_config(target, cfg.layers, cfg)
        head = cls(cfg, layer, taps, target.vocab_size, target.num_layers)
        reset_weights(head.net, float(getattr(target.config, "initializer_range", 0) or 0.02))
        if cfg.draft_vocab:
            head.d2t = vocab.to_d2t(head.choose_vocabulary(counts, cfg.draft_vocab))
        head.to(target.device)
        head.check_loaded(target)
        head.start(target, counts)
        return head

    @classmethod
    def choose_taps(cls, target: Target, cfg: Any) -> tuple[int, ...]:
        """Return the taps of a fresh head. Raises UserError for some that the target does
        not have."""
        raise TypeError("a subclass defines it")

    def start(self, target: Target, counts: Tensor | None) -> None:
        """Give a fresh head of random weights a better start. counts: see for_target. Default:
        none."""

    @torch.no_grad()
    def start_output(self, target: Target) -> None:
        """The LM head starts as the target's rows, the final norm as start_norm says."""
        rows = self.scaled_rows(target)
        if self.net.lm_head is not None:
            self.net.lm_head.weight.copy_(rows)
        start_norm(self.net.norm, rows.float(), target)

    @torch.no_grad()
    def check_loaded(self, target: Target) -> None:
        """Take the mask of a token from the target's table, frozen, in the dtype that the
        target has here."""
        if self.cfg.mask_token >= 0:
            token = torch.tensor([self.cfg.mask_token], device=target.device)
            weight = getattr(self.net, self.mask_name)
            weight.copy_(vocab.table(target, token).view_as(weight))
            weight.requires_grad_(False)

    def distribution(
        self, target: Target, last: Tensor, source: Tensor, place: Tensor
    ) -> TeacherFn:
        """Return the target's distribution of n tokens, from its last features `last` [T,
        D]. source: [n] int64, the row before each token. place: [n] int64, the token in the
        draft vocabulary, -1 outside."""
        mask, ids = self.cfg.loss.mask, self.ids()
        top_k = getattr(self.cfg, "top_k", 0)
        return target_distribution(
            target, self.probs_rows(target), last, source, ids, place, mask, top_k
        )


# -- where fresh draft layers start

SPREAD = 1.5  # of a fresh head's logits


def reset_weights(net: Any, std: float) -> None:
    """Normal weights of spread `std`, norms at one, in place."""
    for name, weight in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(weight)
        elif name.endswith("norm.weight") or weight.dim() == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, 0.0, std)


@torch.no_grad()
def norm_weight(norm: Any, target: Target) -> Tensor:
    """Return the factor [D] by which a norm scales, whatever its convention (Gemma stores
    it minus one): asked of it."""
    width = target.hidden_size
    x = torch.ones(width, dtype=target.dtype, device=target.device)
    x[1::2] = -1  # mean 0 and mean square 1: LayerNorm and RMSNorm leave it as it is
    return ((norm(x[None]) - norm(-x[None])) / 2 * x)[0].float()


def final_norm(target: Target) -> Tensor | None:
    """Return the factor [D] of the target's last norm; None where no known name leads to it."""
    names = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
    body = getattr(target.body, "language_model", target.body)  # of vision-language models
    norm = next((n for name in names if (n := getattr(body, name, None)) is not None), None)
    return norm_weight(norm, target) if isinstance(norm, nn.Module) else None


@torch.no_grad()
def start_norm(final: RMSNorm, rows: Tensor, target: Target) -> None:
    """The final norm starts as the target's, shrunk until random outputs give logits of spread
    SPREAD under an LM head of `rows` [Vd, D]: at full size a fresh head is sure of random
    tokens (SmolLM2: a cross-entropy of 17 where guessing gives 9) and unlearns that first."""
    weight = final_norm(target)
    if weight is not None:
        final.weight.copy_(weight)
    spread = (rows * final.weight).square().sum(1).mean().sqrt()
    final.weight.mul_((SPREAD / spread).clamp(max=1.0))
