"""Targets without their weights: facts of published models (models/*.json, keys as in their
config.json), and models of fake tensors made from them."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, initialization

from outrider.conf.errors import UserError, first_line
from outrider.decode.models.load import TargetConfig, tiny_from
from outrider.decode.models.packages import TARGETS
from outrider.decode.probed import LMHead
from outrider.decode.target import Target

FOLDER = Path(__file__).resolve().parent / "models"


@dataclass(frozen=True)
class Model:
    """A target by its config. published: parameters that its card states, 0 where nobody does."""

    name: str
    config: dict[str, Any]
    published: int = 0

    @property
    def key(self) -> str:
        """What tells it from other models."""
        return json.dumps([self.name, self.config])

    @property
    def text(self) -> Any:
        """transformers' config of the language model."""
        return self.at(0).get_text_config(decoder=True)

    @property
    def layers(self) -> int:
        return int(self.text.num_hidden_layers)

    def at(self, layers: int) -> Any:
        """transformers' config, with so many layers in place of its own (0: as it is)."""
        given = copy.deepcopy(self.config)
        if layers:
            part = given.get("text_config", given)
            part["num_hidden_layers"] = layers
            if "layer_types" in part:
                part["layer_types"] = part["layer_types"][:layers]
        return AutoConfig.for_model(given.pop("model_type"), **given)

    def build(self, layers: int, dtype: torch.dtype, device: str | torch.device) -> Any:
        """The model with weights that were never set, on a device without memory: meta, or a
        phantom. Raises UserError for a config that transformers makes no model from."""
        try:
            with torch.device(device), initialization.no_init_weights():
                model = AutoModelForCausalLM.from_config(self.at(layers), dtype=dtype)
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise UserError(
                f"target: transformers makes no causal language model of {self.name}'s config "
                f"({first_line(error)}); choose a target that it knows"
            ) from None
        model.tie_weights()
        return model.eval()

    def target(self, layers: int, dtype: torch.dtype, device: torch.device) -> Target:
        """A frozen target of so many layers, taken to be scored as most are: it cannot be
        asked what its logits are."""
        target = Target(self.build(layers, dtype, device))
        cap = getattr(target.config, "final_logit_softcapping", None)
        target._head = LMHead(cap=cap, exact=True)
        return target

    @functools.cached_property
    def size(self) -> ModelSize:
        """Its parameters, counted on torch's meta device."""
        model = self.build(0, torch.bfloat16, "meta")
        count = lambda module: sum(p.numel() for p in module.parameters())
        stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
        longest = max(stacks, key=count)
        largest = max(p.numel() for p in longest.parameters())
        return ModelSize(count(model), count(longest), max(map(count, longest)), largest)


@dataclass(frozen=True)
class ModelSize:
    """Parameters: all, in the stacked layers, in the largest of these, and in the largest
    weight of any of them."""

    total: int
    stacked: int
    layer: int
    weight: int


@functools.cache
def shipped() -> dict[str, Model]:
    """Models whose facts lie here, by their repository in lower case."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        facts = json.loads(path.read_text())
        model = Model(facts["repository"], facts["config"], facts["parameters"])
        found[model.name.lower()] = model
    return found


def model_of(cfg: TargetConfig) -> Model:
    """The target that `cfg` names. Raises UserError where its config is not there."""
    if cfg.kind in TARGETS:
        known = TARGETS[cfg.kind]
        return Model(known.name, known.config, known.parameters)
    if cfg.kind == "tiny":
        made = tiny_from(cfg).config.to_dict()
        return Model(f"tiny-{cfg.arch}-{cfg.layers}x{cfg.hidden}", made)
    if cfg.kind == "hub":
        if cfg.name.lower() in shipped():
            return shipped()[cfg.name.lower()]
        here = ", ".join(model.name for model in shipped().values())
        raise UserError(
            f"target.name: the config of {cfg.name} is not here; set target=local "
            f"target.path=FOLDER with its config.json, or choose {here}"
        )
    path = Path(cfg.path).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config["model_type"], str):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"target.path: {path} is no model's config.json ({type(error).__name__}); give a "
            "folder that holds one"
        ) from None
    drop = ("transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype")
    return Model(path.parent.name, {k: v for k, v in config.items() if k not in drop})
