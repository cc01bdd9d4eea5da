"""Bytes that a GPU holds at the peak of training, part by part, by formula: what torch's graph
keeps of a pass, one function a family of heads, and the larger of what the loss holds where it
meets the vocabulary and what the backward pass adds.

Letters: D width, A query heads times their size, G key heads times theirs, M the MLP's width.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig

from outrider.conf.errors import UserError, first_line
from outrider.decode.models import quantize, text
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.facts import context_length
from outrider.decode.models.load import tiny_from, torch_dtype
from outrider.decode.models.packages import TARGETS
from outrider.heads.block.attention import MOST, STRIDE
from outrider.heads.block.head import BlockHead
from outrider.heads.eagle.head import EagleHead
from outrider.heads.layers.head import LayeredHead
from outrider.heads.layers.shape import layer_config
from outrider.heads.losses import CHUNK
from outrider.heads.medusa.base import ParallelHead
from outrider.heads.medusa.hydra_heads import HydraHeads
from outrider.heads.registry import head_class
from outrider.train.config import ValidateConfig

NODE = 8  # GPUs that share a host's memory
RESERVE = 2.5e9  # bytes that no tensor gets: CUDA's context, workspaces, buffers of NCCL
# Numbers in float32 that a layer with a recurrent state makes of a token, times its widest product,
# where the kernel for it is not installed: 6 (delta rule) to 15 (Mamba-2) were counted.
STATES = 15
FRAGMENTS = 0.05  # of what a pass allocates: gaps between the allocator's blocks


# Targets without their weights: by published facts (models/*.json), by a config.json, or tiny
# -------------------------------------------------------------------------------------------


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
    """Return how many layers of a language model look back at keys and values: all but those
    with a recurrent state, convolutions or an MLP alone."""
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


# Bytes
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A planned run. typed: the head's keys. head: on the meta device. layer: keys of its
    draft layers, {} without any. rows, length, tokens, taught: of the largest pass of a rank,
    its supervised tokens. width: bytes of a number that is computed with."""

    cfg: ValidateConfig
    model: Model
    typed: Any
    head: Any
    layer: dict[str, Any]
    rows: int
    length: int
    width: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def taught(self) -> int:
        return self.rows * round(self.length * self.cfg.supervised)

    @property
    def lm_head(self) -> int:
        """Parameters of the head's own LM heads, 0 where it reads the target's."""
        named = self.head.named_parameters()
        return sum(p.numel() for n, p in named if n in ("proj", "net.lm_head.weight"))

    def changed(self, keys: dict[str, Any]) -> Plan:
        """With other values of keys, "head.NAME" among them."""
        own = {k: v for k, v in keys.items() if not k.startswith("head.")}
        heads = {k.removeprefix("head."): v for k, v in keys.items() if k not in own}
        cfg, typed = dataclasses.replace(self.cfg, **own), dataclasses.replace(self.typed, **heads)
        return plan_of(cfg, self.model, typed)


def plan_of(cfg: ValidateConfig, model: Model, typed: Any) -> Plan:
    """typed: the head's keys, its draft vocabulary settled. Raises UserError for a head that
    this target cannot have, or that has no formula."""
    kind, text = head_class(typed.kind), model.text
    length, width = context_length(text), text.hidden_size
    table = SimpleNamespace(shape=(text.vocab_size, width))
    about: Any = SimpleNamespace(
        config=text, hidden_size=width, embedding_weight=table, context_length=length
    )
    layers = getattr(typed, "prefix_layers" if issubclass(kind, HydraHeads) else "layers", 0)
    layer, deep = layer_config(about, layers, typed) if layers else {}, text.num_hidden_layers
    with torch.device("meta"):
        if issubclass(kind, LayeredHead):
            taps = (deep,) if typed.kind == "eagle1" else tuple(typed.taps) or (1, 2, 3)
            head: Any = kind(typed, layer, taps, text.vocab_size, deep)
        elif issubclass(kind, ParallelHead):
            more = (width, layer) if issubclass(kind, HydraHeads) else ()
            head = kind(typed, width, text.vocab_size, deep, "meta", *more)
        else:
            why = "train some steps on one GPU: metrics.jsonl has peak_memory_bytes"
            raise UserError(f"head.kind: a dry run has no formula for {typed.kind}; {why}")
    length, mine = min(cfg.data.max_length, length), max(1, cfg.batch_size // cfg.gpus)
    rows = min(mine, cfg.micro_batch or mine)
    rows = min(rows, max(1, cfg.micro_tokens // length)) if cfg.micro_tokens else rows
    return Plan(cfg, model, typed, head, layer, rows, length, torch_dtype(cfg.dtype).itemsize)


@dataclass
class Kept:
    """Of the head's forward pass. kept: numbers that its graph keeps, weights that were cast
    once among them. products: parameters times the rows that they meet. levels: states that
    meet the vocabulary for each supervised token. late, back: times those states, until the
    loss is done and in the backward pass. wide: bytes of other widths. again: numbers that
    the backward pass makes or computes again. summed: parameters whose gradients add up
    there."""

    kept: float
    products: float
    levels: float = 1
    late: int = 0
    back: int = 2
    wide: float = 0.0
    again: float = 0.0
    summed: int = 0


def kept_by(plan: Plan) -> Kept:
    """Return what the head's forward pass keeps until its backward pass."""
    by = {EagleHead: _eagle, BlockHead: _blocks, ParallelHead: _parallel}
    return next(count(plan) for kind, count in by.items() if isinstance(plan.head, kind))


def _sides(plan: Plan) -> tuple[int, int, int, int]:
    """D, A, G, M of draft layers."""
    keys, size = plan.layer, plan.layer["head_dim"]
    pair = size * keys["num_attention_heads"], size * keys["num_key_value_heads"]
    return keys["hidden_size"], *pair, keys["intermediate_size"]


def _eagle(plan: Plan) -> Kept:
    """Step 0 on all tokens up to its attention, then on the supervised ones; later steps on
    those alone. Kept are a norm's unit output, what a product reads, query, keys, values,
    attention's output, and of an MLP gate, its activation, up, and what goes down."""
    cfg, every, taught, (d, a, g, m) = plan.typed, plan.tokens, plan.taught, _sides(plan)
    third, weights = cfg.kind == "eagle3", numbers(plan.head) - plan.lm_head
    enter, mlp = 2 * a + 2 * g + (4 if third else 3) * d, 2 * d + 4 * m
    more = (cfg.layers - 1) * (4 * d + 2 * a + 2 * g + 4 * m)
    fused = 6 * d if cfg.norm_before_fc else 0
    first = every * (fused + enter + more) + taught * mlp
    step = taught * (enter + mlp + more + (d if cfg.norm_output else 0))
    kept, again = first + (cfg.steps - 1) * step, 0
    if cfg.activation_checkpointing:
        again = step + 2 * taught * m  # and the MLP's gradients
        kept = (every + cfg.steps * taught) * 2 * g + cfg.steps * taught * d
    fc = 3 * d**2 if third else 0
    products = fc * every + 2 * d * (a + 2 * g) * (every - taught)
    products += (weights - fc) * cfg.steps * taught
    kept += every * d + weights  # embeddings for the later steps, and weights cast once
    late, summed = 3 if third else 1, weights if cfg.steps > 1 else 0
    wide = 4 * (1 + cfg.steps) * taught * d if cfg.feature_loss else 0
    return Kept(kept, products, cfg.steps, late, wide=wide, again=again, summed=summed)


def _parallel(plan: Plan) -> Kept:
    """Return the gathered feature, and of every block what SiLU reads and what comes out."""
    cfg, d, weights = plan.typed, plan.model.text.hidden_size, numbers(plan.head) - plan.lm_head
    kept = cfg.heads * plan.taught * d * (1 + 2 * cfg.blocks)
    kept += weights * (cfg.blocks - 1) / cfg.blocks  # the first block's inputs need no gradient
    if isinstance(plan.head, HydraHeads):  # a head reads the tokens before it as well
        kept += plan.taught * d * sum(i + 3 for i in range(cfg.heads))
        return Kept(kept, weights * plan.taught, cfg.heads)
    return Kept(kept, weights * plan.taught, cfg.heads, back=5, summed=weights)


def _blocks(plan: Plan) -> Kept:
    """Layers on the rows of all blocks, which read what each layer makes of all features. In a
    layer's backward pass beside what it keeps: gradients of its MLP, or copies of keys and
    values of a call of attention and their gradients, at first for every query head."""
    cfg, every, (d, a, g, m) = plan.typed, plan.tokens, _sides(plan)
    blocks = cfg.anchors or -(-2 * (plan.taught // plan.rows) // cfg.slots)
    rows, weights = plan.rows * blocks * cfg.block, numbers(plan.head) - plan.lm_head
    context, layer = every * 3 * g, rows * (6 * d + 5 * a + 3 * g + 4 * m)
    keys = plan.length**2 // (2 * STRIDE) + blocks * (STRIDE // 2 + cfg.block)
    again = max(2 * rows * m, min(MOST, keys) * (4 * g + 2 * a))
    if cfg.activation_checkpointing:
        layer, again = rows * d, layer + again
    kept = cfg.layers * (context + layer) + every * (3 + len(plan.head.taps)) * d
    kept += 2 * rows * d + weights
    slots = plan.rows * blocks * cfg.slots
    return Kept(kept, weights * rows, slots / max(plan.taught, 1), again=again)


def parts(plan: Plan) -> dict[str, int]:
    """Return bytes by part at the peak of training on one GPU; their sum is the peak."""
    width, typed, text, terms = plan.width, plan.typed, plan.model.text, plan.typed.loss
    found, master, d = kept_by(plan), max(4, width), text.hidden_size
    vocab, own = typed.draft_vocab or text.vocab_size, master * numbers(plan.head)
    states = found.levels * plan.taught * d * width
    met = vocab * (5 if terms.needs_distribution else 3)
    met += 2 * text.vocab_size if terms.mask == "argmax" or terms.tv or terms.lk else 0
    chunk = min(typed.chunk or CHUNK, plan.taught) * width
    loss = states * (1 + found.late) + chunk * met + plan.lm_head * (master + width)
    backward = found.back * states + master * found.summed + found.again * width
    rows = vocab if terms.needs_distribution and vocab < text.vocab_size else 0
    after = found.kept * width + found.wide
    reads = len(plan.head.taps) + (text.num_hidden_layers not in plan.head.taps)
    in_pass = {
        "activations": after,
        "target's features": plan.tokens * d * width * reads,
        "loss or backward pass": max(loss, backward, _target_pass(plan) - after),
    }
    bytes_of = {
        "target": target_bytes(plan)[1],
        "head": own + rows * d * width,  # and the target's rows of its tokens
        "optimizer moments": 2 * own,
        "gradients": own,
        **in_pass,
        "reserve": RESERVE + FRAGMENTS * sum(in_pass.values()),
    }
    return {name: round(amount) for name, amount in bytes_of.items()}


def _target_pass(plan: Plan) -> float:
    """Return the bytes that a pass of a target with recurrent layers holds, before the head's
    activations; that of attention is small beside these."""
    if attending(plan.model.text) == plan.model.text.num_hidden_layers:
        return 0.0
    named = plan.model.layers.named_parameters()
    wide = max(p.shape[0] for n, p in named if p.dim() == 2 and "expert" not in n)
    return 4.0 * STATES * wide * plan.tokens


def target_bytes(plan: Plan) -> tuple[float, float, float]:
    """Return the bytes of the target's weights: all, on one GPU, and on a host while its ranks
    load them: its files, whose pages the ranks share, and a weight that each may be casting.
    Sharded by FSDP2 a GPU holds three layers beside its shards, the one that
    computes, as it arrived and unpacked, and the next one; a rank that loads what stays
    whole, and one weight at a time."""
    cfg, layers, ranks = plan.cfg, numbers(plan.model.layers), min(plan.cfg.gpus, NODE)
    rest = numbers(plan.model.built) - layers
    bits = quantize.bits(cfg.target.quantize) or 8 * plan.width
    whole = layers * bits // 8 + rest * plan.width
    if not cfg.shard_target:
        largest = max(p.numel() for p in plan.model.built.parameters())
        return whole, whole, (layers + rest + largest * ranks) * plan.width
    shards = layers / (cfg.shard_group or cfg.gpus) + 3 * max(map(numbers, plan.model.layers))
    weight = max(p.numel() for p in plan.model.layers.parameters())
    return whole, (rest + shards) * plan.width, (rest + weight) * plan.width * ranks
