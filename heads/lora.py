"""A LoRA (Hu et al. 2021) on the linear layers of a head or of a separate draft, by peft.

On a head that is there (train.begin, `start=` with head.lora.rank) the head stays frozen and
only the adapter is written, in peft's own form: adapter_model.safetensors and
adapter_config.json beside head.json, which names the frozen head by its folder and the sha256
of its weights. heads.checkpoint.load_as puts it on that head and merges it, so that to every
reader it is a head like any other. What is merged is W + alpha / rank * B A, in the dtype of W.

An LM head is read as a matrix, not called: `weight_of` is that matrix with its adapter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.conf.rules import BelowOne, Filled
from outrider.heads.config import LoraKeys as LoraKeys
from outrider.heads.limits import Count, CountOrZero

# Keys that are no part of a head: it holds its draft vocabulary, however that came about.
UNSAVED = ("draft_vocab_from", "lora")
NAME = "draft"  # peft's name of the adapter
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LM_HEAD = "lm_head"
PREFIX = "base_model.model."  # before the names of tensors in peft's files
ENDS = tuple(f".lora_{side}.{NAME}.weight" for side in "AB")


@dataclass
class Base:
    """The frozen head. path: its folder. sha256: of its weights file. words: tokens that it does
    not draft and the adapted one does, in place of `gone` (heads/words.py)."""

    path: str
    sha256: str
    words: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)


@dataclass
class Adapter:
    """What a head's card says of its adapter. targets: full names of the layers."""

    rank: Count
    alpha: CountOrZero
    dropout: BelowOne
    targets: Filled[str]
    base: Base

    def write(self, tensors: dict[str, Tensor], folder: Path) -> str:
        """peft's two files in an existing folder; the name of the one with the weights.

        Raises OSError or SafetensorError."""
        kept = {k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
        keys = LoraKeys(self.rank, self.alpha, self.dropout)
        settings = _config(keys, self.targets).to_dict()
        settings |= {"base_model_name_or_path": self.base.path, "inference_mode": True}
        text = json.dumps({k: _plain(v) for k, v in sorted(settings.items())}, indent=1)
        (folder / CONFIG).write_text(text + "\n")
        return WEIGHTS


class Adaptable(nn.Module):
    """A module that may learn by a LoRA alone. own_lora: whether it puts one on weights of its
    own and merges it when it is written. lora: the adapter that learns while everything else is
    frozen, None without one."""

    own_lora: ClassVar[bool] = False
    lora: Adapter | None = None

    def adapt(self, keys: LoraKeys, base: Base) -> int:
        """Freeze the head and put a fresh LoRA on its linear layers, as `keys` says. base: where
        these frozen weights lie. Returns how many layers it is on.

        Raises UserError for layers that do not exist."""
        frozen = {id(p): p.dtype for p in self.parameters()}
        names = layers(self, keys)
        wrap(self, keys, names)
        for weight in self.parameters():
            if id(weight) not in frozen:
                weight.data = weight.data.to(max(frozen.values(), key=lambda t: t.itemsize))
        self.lora = Adapter(keys.rank, keys.alpha, keys.dropout, names, base)
        return len(names)

    def merge(self) -> None:
        """Make the adapter part of the weights, which may learn again."""
        merge(self)
        self.lora = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's; with an adapter its tensors alone, by peft's names."""
        whole = super().state_dict(*args, **kwargs)
        return whole if self.lora is None else tensors(whole)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As torch's; with an adapter its tensors alone. Raises RuntimeError when names or
        shapes do not fit."""
        if self.lora is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        odd = set(self.state_dict()) ^ set(state_dict)
        if odd:
            raise RuntimeError(f"the adapter's {sorted(odd)[0]} is missing or unknown")
        return super().load_state_dict(renamed(state_dict), strict=False, assign=assign)


def layers(root: nn.Module, keys: LoraKeys, leave: nn.Module | None = None) -> list[str]:
    """Names of the linear layers of `root` that a LoRA is put on: those of `keys.targets`, or
    all. leave: one that is none of them. Without `keys.words` no LM head is.

    Raises UserError for a target that names no such layer, and where there is no linear layer.
    """
    linear = [(n, m) for n, m in root.named_modules() if isinstance(m, nn.Linear)]
    free = [n for n, m in linear if m is not leave and (keys.words or not _is(n, LM_HEAD))]
    if all(_is(name, LM_HEAD) for name in free):
        raise UserError(
            "head.lora.rank: this kind of head has no linear layers of its own; set "
            "head.lora.rank=0, which trains all of its weights"
        )
    for wanted in keys.targets:
        if not any(_is(name, wanted) for name in free):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in free}))
            raise UserError(f"head.lora.targets: {wanted[:80]!r} is no layer; choose among {known}")
    return [n for n in free if not keys.targets or any(_is(n, wanted) for wanted in keys.targets)]


def weight_of(layer: Any) -> Tensor:
    """[out, in] the matrix of a linear layer, with its adapter where it has one (its dropout
    left out); gradients reach what learns."""
    weight: Tensor = layer.weight
    for name in layer.active_adapters if hasattr(layer, "lora_A") else ():
        weight = weight + layer.get_delta_weight(name)
    return weight


def wrap(root: nn.Module, keys: LoraKeys, names: list[str]) -> None:
    """Put a fresh LoRA on the named layers, in place; nothing else learns then.

    Raises ValueError for names that peft does not find."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(_config(keys, names), root, NAME)


def merge(root: nn.Module) -> None:
    """Put the layers of `root` that are wrapped back, in place, the update added to them in
    float32 or better. No copy of a layer keeps its adapter."""
    wrapped = [(n, m) for n, m in root.named_modules() if hasattr(m, "lora_A")]
    for name, part in wrapped:
        layer: Any = part
        base = layer.get_base_layer()
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        base.weight.data = base.weight.data.to(wide)
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(root.get_submodule(parent), last, base)
    if hasattr(root, "peft_config"):
        del root.peft_config


def tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a wrapped module's state_dict the adapter's tensors, by their names in peft's files."""
    return {
        f"{PREFIX}{name.replace(f'.{NAME}.weight', '.weight')}": value
        for name, value in state.items()
        if name.endswith(ENDS)
    }


def renamed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way round: from peft's names to those of the wrapped module."""
    return {
        name.removeprefix(PREFIX).removesuffix(".weight") + f".{NAME}.weight": value
        for name, value in found.items()
    }


def _is(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _config(keys: LoraKeys, names: list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=keys.rank, lora_alpha=keys.alpha, lora_dropout=keys.dropout, target_modules=names
    )


def _plain(value: Any) -> Any:
    """A value of peft's config as JSON; sets in order, so that a file has the same bits again."""
    if isinstance(value, set):
        return sorted(value)
    return getattr(value, "value", value)
