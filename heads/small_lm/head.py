"""A separate small language model as a drafter, distilled from the target (Leviathan et al.
2022; DistillSpec 2023).

It is cut from the target, under the target's own embedding and LM head, or starts from any
smaller causal language model with the same tokenizer. It reads no features: the finished
head is an ordinary transformers folder that works as `assistant_model=` elsewhere. With
`lora.rank` only a LoRA learns, which is merged when the head is saved.

Shape letters: B rows, T positions, D width, n supervised tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.utils import logging

from outrider.conf.errors import UserError
from outrider.conf.typed import SHORT
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.target import Target
from outrider.heads import shapes
from outrider.heads.base import Head
from outrider.heads.batch import Batch, LossOut
from outrider.heads.config import MOST, MOST_DEPTH, MOST_LAYERS
from outrider.heads.losses import Taught, chunked_loss
from outrider.heads.names import DraftSpec
from outrider.heads.saved import Saved, differing
from outrider.heads.small_lm.config import SmallLMConfig
from outrider.heads.small_lm.net import (
    aliases,
    bare,
    chosen_layers,
    cut,
    empty,
    freeze,
    inject,
    load_base,
    merged,
    parameters,
)
from outrider.heads.teacher import TeacherFn, target_distribution

MODEL = "model.safetensors"


@dataclass(kw_only=True)
class SmallLMSaved(Saved):
    """The contents of the card. model: its transformers config. layers: those of the target
    it was cut from, [] for another model. merged: whether its LoRA is in the weights.
    draft_ids: the draft vocabulary, [] for the whole one."""

    config: SmallLMConfig
    model: dict[str, Any]
    layers: list[int]
    merged: bool
    draft_ids: list[int]
    parameters: int = 0

    def fits(self, target: Target) -> list[str]:
        """Compare with the target; refuse counts that would take hours to build."""
        ids, deep, size = self.draft_ids, target.num_layers, target.vocab_size
        found = shapes.problems(self.calibration, MOST_DEPTH, len(ids) or size)
        if len(ids) != self.config.draft_vocab or ids != sorted({i for i in ids if 0 <= i < size}):
            found.append(
                f"draft_ids: are not config.draft_vocab={self.config.draft_vocab} different "
                f"tokens of 0..{size - 1} in order"
            )
        count = self.config.from_target_layers
        if self.layers != sorted({i for i in self.layers if 0 <= i < deep}):
            found.append(f"layers: {self.layers[:9]} are not layers of 0..{deep - 1} in order")
        elif len(self.layers) != count:
            found.append(f"layers: {len(self.layers)}, config.from_target_layers is {count}")
        return found + _absurd(self.model)

    def empty(self) -> Any:
        """Build a model of this config whose weights mean nothing."""
        from transformers import AutoConfig

        keys = dict(self.model)
        return empty(AutoConfig.for_model(str(keys.pop("model_type", "")), **keys))


class SmallLM(Head):
    """net: the causal language model, trained weights in float32, frozen ones in the target's
    dtype.

    Frozen weights of a draft cut from the target are the target's own tensors and not stored
    in checkpoints.
    chosen: [Vd] int64 ascending tokens that the drafter proposes, None for all."""

    kind = "small_lm"
    Config, Saved = SmallLMConfig, SmallLMSaved

    def __init__(
        self, cfg: SmallLMConfig, net: Any, target: Target, given: dict[str, Tensor] | None
    ) -> None:
        """given: the target's tensors by net's names, when it was cut from it."""
        super().__init__(cfg)
        self.cfg: SmallLMConfig = cfg
        draft = Target(net)  # freezes everything for a moment
        self.finish, self.stack = draft.head, draft.tapped_layers
        if not self.finish.exact:
            raise UserError(
                "head: the draft's logits do not follow from its last hidden state "
                f"({self.finish.reason}); choose another model"
            )
        self.net = net
        self.dtype, self.tokenizer = target.dtype, target.tokenizer
        self.layers: list[int] = []
        self.chosen: Tensor | None = None
        self.vocab = min(net.get_input_embeddings().weight.shape[0], target.vocab_size)
        self.outside = freeze(net, cfg, self.dtype, given or {})
        if cfg.lora.rank:
            inject(net, cfg.lora)
        self.to(target.device)
        self.train(self.training)

    # -- making one

    @classmethod
    def for_target(cls, target: Target, cfg: SmallLMConfig, counts: Tensor | None = None) -> Self:
        """Cut or load a fresh draft. Raises UserError for a count of layers outside the
        target's, a source that cannot be loaded, or one with another tokenizer (the first
        difference is named)."""
        if cfg.from_target_layers:
            layers = chosen_layers(target.num_layers, cfg.from_target_layers)
            net, given = cut(target, layers)
            head = cls(cfg, net, target, given)
            head.layers = layers
        else:
            head = cls(cfg, load_base(cfg, target), target, None)
        if cfg.draft_vocab:
            known = None if counts is None else counts[: head.vocab]
            head.chosen = head.choose_vocabulary(known, cfg.draft_vocab).to(target.device)
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        """Make the empty draft: cut from the target again, or after its own config."""
        cfg = known.config
        if known.merged:
            cfg = replace(cfg, lora=replace(cfg.lora, rank=0))
        net, given = cut(target, known.layers) if known.layers else (known.empty(), None)
        head = cls(cfg, net, target, given)
        ids = known.draft_ids
        head.layers = list(known.layers)
        head.chosen = torch.tensor(ids, dtype=torch.int64, device=target.device) if ids else None
        return head

    @classmethod
    def misfits(
        cls, saved: dict[str, Any], target: Target, stored: dict[str, tuple[int, ...]]
    ) -> list[str]:
        """Compare sizes. A draft that was cut from the target has the target's sizes:
        load_state_dict compares them."""
        known = SmallLMSaved.read(saved, target, cls.kind)
        if known.layers:
            return []
        net = known.empty()
        tied = aliases(net)
        wanted = {k: tuple(v.shape) for k, v in net.state_dict().items() if k not in tied}
        named = {bare(k): size for k, size in stored.items()}
        return differing(wanted, {k: size for k, size in named.items() if k in wanted})

    @torch.no_grad()
    def check_loaded(self, target: Target) -> None:
        """Try one pass over two tokens. A model's config says more than sizes, and what it
        says can be wrong. Raises UserError then."""
        if not self.hidden(torch.tensor([[0, 1]], device=target.device)).isfinite().all():
            raise UserError("head.model: its pass gives NaN or infinity")

    def ids(self) -> Tensor | None:
        return self.chosen

    def train(self, mode: bool = True) -> Self:
        """Switch a LoRA's dropout; the draft has none of its own while it learns."""
        super().train(mode)
        if hasattr(self, "net"):
            self.net.train(False)
            for name, part in self.net.named_modules():
                if "lora_dropout" in name:
                    part.train(mode)
        return self

    # -- training

    def plan(self, batch: Batch, step: int) -> Tensor:
        return batch.supervised(1)

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Return the loss over the supervised tokens, each predicted from all tokens before
        it. No rollout: a draft step sees committed tokens and its own guesses, which are
        the target's wherever they are kept."""
        flat = self.planned(batch)
        place = batch.ids.reshape(-1)[flat]
        x = self.hidden(batch.ids).flatten(0, 1)[flat - 1]
        # A softcap keeps the order and is left out.
        x = x * self.finish.scale if self.finish.scale != 1 else x
        out = self.net.get_output_embeddings()
        bias = getattr(out, "bias", None)
        extra = None if bias is None else (x.new_ones(flat.numel(), 1), bias[: self.vocab, None])
        inside = torch.where(place < self.vocab, place, -1)
        distribution = self._taught(batch, target, flat, inside)
        whole, one = torch.ones_like(flat, dtype=torch.bool)[None], torch.ones(1, device=x.device)
        taught = Taught(inside, whole, self.cfg.loss, one, distribution, self.cfg.chunk)
        total, rows = chunked_loss(x[None], out.weight[: self.vocab], taught, extra)
        count = torch.tensor(float(flat.numel()), dtype=torch.float64, device=x.device)
        return LossOut(total, count, rows.stats())

    def _taught(
        self, batch: Batch, target: Target, flat: Tensor, inside: Tensor
    ) -> TeacherFn | None:
        """Return the target's distribution of the tokens, None where no term needs it."""
        terms = self.cfg.loss
        if not terms.needs_distribution:
            return None
        feats = target.features(batch.ids, batch.mask, (target.num_layers,))[:, :, 0].flatten(0, 1)
        rows = target.lm_head_weight.detach(), getattr(target.lm_head, "bias", None)
        ids = None
        if self.vocab < target.vocab_size:
            ids = torch.arange(self.vocab, device=inside.device)
            if not (terms.mask == "argmax" or terms.tv or terms.lk):
                rows = (rows[0][: self.vocab], None if rows[1] is None else rows[1][: self.vocab])
        return target_distribution(target, rows, feats, flat - 1, ids, inside, terms.mask)

    def compiles(self) -> list[tuple[Any, str]]:
        return [(layer, "forward") for layer in self.stack]

    def hidden(self, ids: Tensor) -> Tensor:
        """Return [B, T, D], the draft's last hidden states, after its final norm, computed
        in the target's dtype: the master weights are cast for the pass, so that training
        and drafting do the same arithmetic."""
        body = self.net.base_model
        cast = {
            n: p if p.dtype == self.dtype else p.to(self.dtype) for n, p in body.named_parameters()
        }
        kwargs = {
            "input_ids": ids.clamp(max=self.vocab - 1),
            "use_cache": False,
            "return_dict": True,
        }
        return functional_call(body, cast, kwargs=kwargs).last_hidden_state  # type: ignore[no-any-return]

    @torch.no_grad()
    def teacher_forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Yield what a chain would draft. A separate model's distribution does not depend
        on the level: the same logits serve all."""
        out = self.net.get_output_embeddings()
        keep: Any = slice(0, self.vocab) if self.chosen is None else self.chosen
        weight, bias = out.weight[keep].to(self.dtype), getattr(out, "bias", None)
        bias = None if bias is None else bias[keep].to(self.dtype)
        x = self.hidden(batch.ids).flatten(0, 1)
        for part in self.plan(batch, 0).split(self.cfg.chunk):
            z = self.finish.finish(nn.functional.linear(x[part - 1], weight, bias))
            for level in range(levels):
                # The anchor, two before the first level, must exist.
                deep = part % batch.ids.shape[1] >= 2 + level
                yield part[deep], level, z[deep]

    @property
    def levels(self) -> int:
        return self.cfg.depth

    def measure(self, table: Tensor) -> dict[str, Any]:
        """Measure acceptance: a draft is right to a depth when the ranks of so many tokens
        in a row are those of its path. Also the teacher-forced accepted length of a chain
        (bonus token counted)."""
        chain = (table == 0).cumprod(1).sum(1).double().mean()
        return {**super().measure(table), "teacher_forced": 1 + float(chain)}

    # -- drafting

    def plain(self) -> Any:
        """Copy the model as it drafts and is saved (heads.small_lm.net.merged)."""
        return merged(self.net, self.outside, self.dtype)

    def drafter(self, target: Target, draft: DraftSpec | None = None) -> Drafter:
        form, own = self.form(target, draft), Target(self.plain(), self.tokenizer)
        own.packs_weights, own.captures = target.packs_weights, target.captures
        name = f"{self.kind}@{form.shape}"
        return DraftModel(own, form, name, ids=self.chosen, vocab_size=target.vocab_size)

    # -- on disk

    def config_json(self) -> dict[str, Any]:
        return {
            **super().config_json(),
            "model": self.net.config.to_diff_dict(),
            "layers": self.layers,
            "merged": False,
            "draft_ids": [] if self.chosen is None else self.chosen.tolist(),
            "parameters": parameters(self.net),
        }

    def write(self, folder: Path, finished: bool) -> tuple[str, dict[str, Any]]:
        """Write the weights. A finished draft is an ordinary transformers folder: config,
        generation config, tokenizer, weights in the target's dtype with any LoRA merged."""
        if not finished:
            return super().write(folder, finished)
        net = self.plain()
        net.config.dtype = self.dtype
        logging.disable_progress_bar()
        net.save_pretrained(folder, max_shard_size="1000GB")
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        return MODEL, {**self.config_json(), "merged": True}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is this head's own: no weight of the target, no tied weight twice."""
        whole = super().state_dict(*args, **kwargs)
        return {k: v for k, v in whole.items() if bare(k) not in self.outside}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Also from the names of a finished folder. Raises RuntimeError when names or shapes
        do not fit."""
        finished = not any(name.startswith("net.") for name in state_dict)
        state = {f"net.{k}" if finished else k: v for k, v in state_dict.items()}
        if finished:  # the target's own are there
            state = {k: v for k, v in state.items() if bare(k) not in self.outside}
        found = super().load_state_dict(state, strict=False, assign=assign)
        odd = [k for k in found.missing_keys if bare(k) not in self.outside]
        if strict and (odd := [*odd, *found.unexpected_keys]):
            raise RuntimeError(f"weights {', '.join(odd[:3])} are missing or unknown")
        return found


def _absurd(model: dict[str, Any], key: str = "model") -> list[str]:
    """Counts in a model's config that would take hours to build before anything is
    compared."""
    for name, value in model.items():
        if isinstance(value, dict) and (found := _absurd(value, f"{key}.{name}")):
            return found
        most = MOST_LAYERS if "layer" in name else MOST
        if isinstance(value, int) and abs(value) > most:
            return [f"{key}.{name}: {SHORT.repr(value)} is above {most}"]
    return []
