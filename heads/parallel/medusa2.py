"""Medusa-2 (Cai et al. 2024): Medusa heads and a LoRA on the target, trained together; the
target itself changes.

The heads read the adapted target's features, and their gradient reaches the adapter. What
keeps the target itself is self-distillation: KL from the distribution without the adapter to the
distribution with it, at the supervised tokens. The loss is

    distil * KL + head_weight * ramp(step) * Medusa's loss,   ramp = sin(pi / 2 * min(1, step /
                                                              (ramp * steps)))

and the heads' learning rate is head_lr times the adapter's. The head's state holds the
adapter, so a checkpoint keeps both together. Loading one merges the adapter into the target
and gives the target an identity of its own: from then on "lossless" refers to the tuned
target, and other heads of the original target are refused. Trained by train/medusa.py
head=medusa2; conf/head/medusa2.yaml holds the keys.

Shape letters: B rows, T positions, D width, V vocabulary, n supervised tokens, m tokens of a
chunk.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.conf.errors import UserError, first_line
from outrider.decode.models.identity import Identity, sha256_state
from outrider.decode.target import Target
from outrider.heads.batch import Batch, LossOut
from outrider.heads.losses import chunk_of
from outrider.heads.parallel.medusa import MedusaHead, MedusaSaved
from outrider.heads.recompute import layers_recomputed
from outrider.heads.saved import differing

ADAPTER = "medusa2"  # peft's name of it
TRAINABLE = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(kw_only=True)
class Medusa2Saved(MedusaSaved):
    """See ParallelSaved. adapter: name of each matrix -> its shape."""

    adapter: dict[str, list[int]]
    adapter_sha256: str

    def fits(self, target: Target) -> list[str]:
        """See Saved."""
        bad = [
            k
            for k, size in self.adapter.items()
            if len(size) != 2 or min(size) < 1 or "." in k or not k
        ]
        more = [f"adapter: {bad[0][:80]!r} is no matrix of a LoRA"] if bad else []
        return super().fits(target) + more


class Medusa2Head(MedusaHead):
    """MedusaHead and adapter: {layer/lora_A, layer/lora_B: float32}, the very tensors of the
    target's LoRA layers while it trains, or their record once they are merged."""

    kind = "medusa2"
    Saved: ClassVar[type[MedusaSaved]] = Medusa2Saved
    trains_target: ClassVar[bool] = True

    def make(self, device: torch.device | str | None) -> None:
        """See ParallelHead; the adapter comes later."""
        super().make(device)
        self.adapter = nn.ParameterDict()
        self.layers: list[
            tuple[str, Any]
        ] = []  # the target's LoRA layers by name; a plain list, so not our modules
        self.strength = 1.0
        self.stated = ""  # content hash of the adapter by the card that this head was loaded from

    @classmethod
    def for_target(cls, target: Target, cfg: Any, counts: Tensor | None = None) -> Self:
        """See Head. Puts the adapter into the target. Raises UserError for a target whose
        weights cannot train.
        """
        head = super().for_target(target, cfg, counts)
        head._inject(target)
        target.tuning = "LoRA in training"
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        """See Stored."""
        head = super().restored(known, target)
        head.adapter = nn.ParameterDict(
            {k: nn.Parameter(torch.zeros(size)) for k, size in known.adapter.items()}
        )
        head.stated = known.adapter_sha256
        return head

    def config_json(self) -> dict[str, Any]:
        """See MedusaHead; also the adapter's shapes and content."""
        return {
            **super().config_json(),
            "adapter": {k: list(v.shape) for k, v in self.adapter.items()},
            "adapter_sha256": self.adapter_sha256(),
        }

    def adapter_sha256(self) -> str:
        """Content hash of the adapter's weights and strength."""
        tune = self.cfg.tune
        text = f"{sha256_state(dict(self.adapter.items()))} {tune.alpha / tune.rank!r}"
        return hashlib.sha256(text.encode()).hexdigest()

    # -- the adapter

    def _inject(self, target: Target) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        dtype = target.dtype
        if dtype not in TRAINABLE:
            name = str(dtype).removeprefix("torch.")
            raise UserError(
                f"dtype: a LoRA cannot be trained on a target loaded as {name}; use "
                "bfloat16 or float32"
            )
        tune, found = self.cfg.tune, _linear_layers(target)
        config = LoraConfig(
            r=tune.rank,
            lora_alpha=tune.alpha,
            lora_dropout=tune.dropout,
            target_modules=list(tune.targets) or list(found),
            fan_in_fan_out=not any(isinstance(part, nn.Linear) for part in found.values()),
        )
        try:
            inject_adapter_in_model(config, target.model, ADAPTER)
        except ValueError as error:
            raise UserError(f"head.tune.targets: {first_line(error)}") from None
        self.layers = _lora_layers(target)
        for name, layer in self.layers:
            if not layer.get_base_layer().weight.is_floating_point():
                raise UserError(
                    f"target: {name} is stored as {layer.get_base_layer().weight.dtype}, which "
                    "takes no gradient; load weights that are not quantised"
                )
        own = {}
        for key, weight in _weights(self.layers).items():
            weight.data = weight.data.float()  # master weights, as the heads'
            own[key] = weight
        self.adapter = nn.ParameterDict(own)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """The target stays in eval mode; only the adapter's dropout follows the head."""
        for _, layer in getattr(self, "layers", []):
            layer.train(False)
            layer.lora_dropout.train(mode)
        return super().train(mode)

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The target as it was."""
        for _, layer in self.layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for _, layer in self.layers:
                layer.enable_adapters(True)

    @classmethod
    def differences(cls, card: dict[str, Any], identity: Identity) -> list[str]:
        """See Head: the target as it was, or as this very head has tuned it."""
        base, stated = Identity.from_json(card["target"]), card["head"].get("adapter_sha256")
        if not isinstance(stated, str) or not re.fullmatch("[0-9a-f]{64}", stated):
            return base.differences(identity)  # from_json will say what is wrong with the card
        tuned = tuned_identity(base, stated)
        return [] if not tuned.differences(identity) else base.differences(identity)

    @torch.no_grad()
    def attach(self, target: Target) -> None:
        """See Head: merge the adapter into the target, once.

        Raises UserError for a target with another adapter, and for an adapter that is not the
        card's or has no place in the target; the target is then as it was.
        """
        sha = self.adapter_sha256()
        if self.stated and self.stated != sha:
            raise UserError("head.adapter_sha256: differs from the adapter in the weights")
        if target.tuning == f"LoRA {sha[:12]}":
            return
        live = _lora_layers(target)
        if live:  # the target of a running training
            now = _weights(live)
            same = set(now) == set(self.adapter)
            if not same or not all(
                torch.equal(now[k].cpu(), v.cpu()) for k, v in self.adapter.items()
            ):
                raise UserError(
                    "target: carries an adapter with other weights; load the head into a "
                    "fresh target"
                )
            return
        record = {k: v.detach().clone() for k, v in self.adapter.items()}
        wanted = _adapter_sizes(target, self.cfg.tune.targets, self.cfg.tune.rank)
        odd = differing(wanted, {k: tuple(v.shape) for k, v in record.items()})
        if odd:
            raise UserError(f"head.adapter: is not for this target ({odd[0]})")
        self._inject(target)
        for key, weight in self.adapter.items():
            weight.copy_(record[key])
        for name, layer in self.layers:
            layer.merge()
            parent, _, last = name.rpartition(".")
            setattr(target.model.get_submodule(parent), last, layer.get_base_layer())
        self.layers = []
        self.adapter = nn.ParameterDict(
            {k: nn.Parameter(v, requires_grad=False) for k, v in record.items()}
        )
        target.model.requires_grad_(False).eval()
        target.tuning = f"LoRA {sha[:12]}"
        if target.identity is not None:
            target.identity = tuned_identity(target.identity, sha)

    # -- training

    def parameter_groups(self) -> list[dict[str, Any]]:
        """See Head: the adapter at the run's learning rate, the heads at head_lr times it."""
        adapter = {id(p) for p in self.adapter.values()}
        mine = [p for p in self.parameters() if p.requires_grad and id(p) not in adapter]
        return [
            {"params": mine, "lr_scale": self.cfg.tune.head_lr},
            {"params": list(self.adapter.values()), "lr_scale": 1.0},
        ]

    def begin_step(self, step: int, steps: int) -> None:
        """See Head: the ramp of the heads' loss."""
        super().begin_step(step, steps)
        rise = self.cfg.tune.ramp * steps
        self.strength = math.sin(math.pi / 2 * min(1.0, (step + 1) / rise)) if rise else 1.0

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """See the head of this file. The count is the number of supervised tokens."""
        with torch.no_grad(), self.without_adapter():
            base = super()._features(batch, target)[0]
        feats, flat = self._features(batch, target)
        out = self.loss(batch, target, feats, flat)
        divergence = _divergence(
            feats, base, flat - 1, target, chunk_of(self.cfg.chunk, feats.device)
        )
        total = (
            self.cfg.tune.distil * divergence + self.cfg.tune.head_weight * self.strength * out.sum
        )
        return LossOut(
            total,
            out.count,
            {**out.stats, "kl": torch.stack([divergence.detach().double(), out.count])},
        )

    def _features(self, batch: Batch, target: Target) -> tuple[Tensor, Tensor]:
        with layers_recomputed(target.model, self.cfg.activation_checkpointing):
            feats = target.features(
                batch.ids, batch.mask, self.taps, torch.is_grad_enabled(), batch.position
            )[:, :, 0]
        return feats.reshape(-1, feats.shape[-1]), self.planned(batch)


def tuned_identity(base: Identity, adapter_sha256: str) -> Identity:
    """Who the target is once the adapter is merged into it."""
    weights = hashlib.sha256(f"{base.weights_sha256} + lora {adapter_sha256}".encode()).hexdigest()
    return replace(
        base, name=f"{base.name} tuned by Medusa-2 {adapter_sha256[:8]}", weights_sha256=weights
    )


def _linear_layers(target: Target) -> dict[str, nn.Module]:
    """Every linear layer of the target but the LM head, by name; experts kept as one stacked
    weight are left alone.
    """
    return {
        name: part
        for name, part in target.model.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not target.lm_head
    }


def _adapter_sizes(target: Target, targets: list[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the matrices of an adapter on the layers that `targets` names, by
    peft's rule: a whole name or its end behind a dot. No targets: all linear layers."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, part in _linear_layers(target).items():
        if targets and not any(f".{name}".endswith(f".{t}") for t in targets):
            continue
        weight = part.weight if isinstance(part, nn.Linear) else part.weight.T  # type: ignore[union-attr, operator]
        wide, narrow = weight.shape  # type: ignore[union-attr, misc]
        key = name.replace(".", "/")
        sizes |= {f"{key}/lora_A": (rank, narrow), f"{key}/lora_B": (wide, rank)}
    return sizes


def _lora_layers(target: Target) -> list[tuple[str, Any]]:
    """The target's LoRA layers of this head, by name."""
    from peft.tuners.lora import LoraLayer

    return [
        (name, part)
        for name, part in target.model.named_modules()
        if isinstance(part, LoraLayer) and ADAPTER in part.lora_A
    ]


def _weights(layers: list[tuple[str, Any]]) -> dict[str, nn.Parameter]:
    """Their trained matrices; a dot may not stand in a key of a ParameterDict."""
    return {
        f"{name.replace('.', '/')}/{side}": getattr(layer, side)[ADAPTER].weight
        for name, layer in layers
        for side in ("lora_A", "lora_B")
    }


def _divergence(feats: Tensor, base: Tensor, flat: Tensor, target: Target, chunk: int) -> Tensor:
    """Sum over `flat` [n] of KL(p_base || p_tuned), distributions over V from features [B * T, D].
    In chunks: the gradient with respect to a chunk's features is taken where its logits are, so [n,
    V] never exists; softcap and bias included."""
    value, total = (
        feats.new_zeros((), dtype=torch.float32),
        feats.new_zeros((), dtype=torch.float32),
    )
    for part in flat.split(chunk):
        old = target.unembed(base[part]).float().log_softmax(-1)
        leaf = feats[part].detach().requires_grad_(torch.is_grad_enabled())
        new = target.unembed(leaf).float().log_softmax(-1)
        kl = (old.exp() * (old - new)).sum()
        value = value + kl.detach()
        if leaf.requires_grad:
            kl.backward()  # reaches the leaf alone: everything behind it is frozen
            assert leaf.grad is not None
            total = total + (feats[part] * leaf.grad).sum(dtype=torch.float32)
    return total - total.detach() + value
