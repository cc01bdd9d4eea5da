"""Targets without their weights: by published facts (models/*.json), by a config.json, or
tiny."""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from outrider.conf.errors import UserError, first_line
from outrider.decode.models import text
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.load import tiny_from
from outrider.decode.models.packages import TARGETS


@dataclass(frozen=True)
class Model:
    """A target by its config."""

    name: str
    config: dict[str, Any]

    @functools.cached_property
    def built(self) -> Any:
        """The model on torch's meta device, where weights take no memory. Raises UserError
        for a config that transformers makes none from."""
        given = copy.deepcopy(self.config)
        try:
            config = AutoConfig.for_model(given.pop("model_type", ""), **given)
            return text.empty(config)
        except Exception as error:  # of many kinds, all of them about the config
            raise UserError(
                f"target: transformers makes no causal language model of {self.name}'s config "
                f"({first_line(error.__cause__ or error)}); choose a target that it knows"
            ) from None

    @property
    def text(self) -> Any:
        """transformers' config of the language model."""
        return self.built.config.get_text_config(decoder=True)

    @functools.cached_property
    def layers(self) -> torch.nn.ModuleList:
        """The stacked layers."""
        stacks = (m for m in self.built.modules() if isinstance(m, torch.nn.ModuleList))
        return max(stacks, key=numbers)


def numbers(module: torch.nn.Module) -> int:
    """Return how many parameters a module has."""
    return sum(p.numel() for p in module.parameters())


def active(model: Model) -> float:
    """Parameters of a target's layers that a token meets."""
    experts = sum(p.numel() for n, p in model.layers.named_parameters() if ".experts." in n)
    if not experts:
        return numbers(model.layers)
    many = getattr(model.text, "num_local_experts", 0) or model.text.num_experts
    return numbers(model.layers) - experts * (1 - model.text.num_experts_per_tok / many)


def attending(text: Any) -> int:
    """Return how many layers of a language model look back at keys and values: all but those with
    a recurrent state, convolutions or an MLP alone."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return sum(kind not in ("linear_attention", "conv", "mlp", "moe") for kind in kinds)


@functools.cache
def shipped() -> dict[str, Model]:
    """Models whose facts lie here, by their repository in lower case."""
    files = sorted(Path(__file__).parent.glob("models/*.json"))
    facts = (json.loads(path.read_text()) for path in files)
    return {f["repository"].lower(): Model(f["repository"], f["config"]) for f in facts}


def model_of(cfg: TargetConfig) -> Model:
    """Return the target that `cfg` names. Raises UserError where its config is not there."""
    if cfg.kind in TARGETS:
        return Model(TARGETS[cfg.kind].name, TARGETS[cfg.kind].config)
    if cfg.kind == "tiny":
        with torch.device("meta"):
            made = tiny_from(cfg).config.to_dict()
        return Model(f"tiny-{cfg.arch}-{cfg.layers}x{cfg.hidden}", made)
    if cfg.kind == "hub":
        if found := shipped().get(cfg.name.lower()):
            return found
        raise UserError(
            f"target.name: the config of {cfg.name} is not here; give its folder by target=local "
            f"target.path=FOLDER, or choose one of {Path(__file__).parent / 'models'}"
        )
    path = Path(cfg.path).expanduser() / "config.json"
    try:
        # transformers writes infinity as {"__float__": "Infinity"}
        text = re.sub(r'\{\s*"__float__": "(-?\w+)"\s*\}', r"\1", path.read_text())
        config = dict(json.loads(text))
        return Model(path.parent.name, config)
    except (OSError, ValueError, TypeError):
        raise UserError(f"target.path: {path} is no model's config.json") from None
