"""What a cycle costs by parts on a target, for chains of K drafted tokens: the target's pass, how
much of it its matrices alone take, the drafter, and the rest. From it follows whether the gain of
drafting grows with the target, and a prediction for one that is too large for this machine.

    python scripts/lab/cycle_parts.py target=smollm2 out=docs/results/cycle-parts-smollm2.json
    python scripts/lab/cycle_parts.py shape=llama31_8b out=docs/results/cycle-parts-llama31_8b.json
    make readme

CPU seconds of one thread, in rounds over all K. Costs hang neither on the weights nor on what is
accepted, so the drafter is an EAGLE-3 head without training. A target with its first `layers`
alone is measured too: passes grow by the same time with every layer, and how well the whole
target is met from there is what a prediction by `shape` (random weights of a larger one, those
few layers) is worth. Stopped, the same command goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor, nn

from outrider.conf.rules import Filled, NotEmpty, NotNegative, OneOrMore, ZeroOrMore, one_of
from outrider.conf.schema import entry
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Engine, Request
from outrider.decode.models.config import DTYPES, AutoDtype, TargetConfig
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import head_class
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.names import DraftSpec
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.pipeline import Deadline

# Targets that are known by their shape alone, as their config.json has it.
SHAPES: dict[str, dict[str, Any]] = {
    "llama31_8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
}


@dataclass(frozen=True)
class CyclePartsConfig(AutoDtype):
    """Keys of scripts/lab/cycle_parts.py."""

    # JSON to write
    out: NotEmpty
    # the frozen model
    target: TargetConfig = field(default_factory=TargetConfig)
    # in its place random weights of this shape, with `layers` alone
    shape: Literal["", "llama31_8b"] = ""
    # how many of its first layers; measured beside the whole target
    layers: Filled[OneOrMore] = field(default_factory=lambda: [8, 4])
    # drafted tokens of a cycle
    drafted: Filled[ZeroOrMore] = field(default_factory=lambda: [0, 1, 2, 3, 4, 8, 16])
    # over all of these
    rounds: OneOrMore = 9
    # of every number of drafted tokens in a round
    cycles: OneOrMore = 8
    # of the prompt
    context: OneOrMore = 256
    # of the head
    draft_vocab: OneOrMore = 8192
    # number format of the target; auto: bfloat16, but float32 with weights of 16 bits on a CPU
    # without instructions for it
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    # of work before it stops; 0 = to the end
    minutes: NotNegative = 0.0


def shaped(shape: str, layers: int, dtype: str) -> Target:
    """A target of a shape with so many layers, whose weights of 16 bits mean nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape] | {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(weight)
            continue
        flat = weight.data.view(-1)
        for at in range(0, flat.numel(), block.numel()):
            flat[at : at + block.numel()] = block[: flat.numel() - at]
    return Target(model.eval().requires_grad_(False))


def first_layers(target: Target, count: int) -> Target:
    """The same model with its first `count` layers."""
    target.unpack_weights()  # the next one packs its own
    model = target.model
    model.model.layers = nn.ModuleList(list(model.model.layers)[:count])
    model.config.num_hidden_layers = count
    return Target(model, target.tokenizer, target.identity)


def depths(cfg: CyclePartsConfig) -> Iterator[Target]:
    """The target with all its layers, then with ever fewer; each takes the one before with it."""
    few = sorted(set(cfg.layers), reverse=True)
    if cfg.shape:
        target = shaped(cfg.shape, few[0], cfg.dtype)
    else:
        target = load_target(cfg.target, cfg.dtype, "cpu")
    yield target
    for count in few:
        if count < target.num_layers:
            target = first_layers(target, count)
            yield target


class Cycles:
    """Cycles of a target with a fresh head, or with none where nothing is drafted."""

    def __init__(self, cfg: CyclePartsConfig, target: Target) -> None:
        self.cfg, self.target = cfg, target
        size = min(cfg.draft_vocab, target.vocab_size)
        counts = torch.arange(target.vocab_size, 0, -1)
        keys = EagleConfig(draft_vocab=size)
        kind = head_class(keys.kind)
        self.head = kind.for_target(target, kind.completed(keys, target), counts)
        target.expected_passes = 1 << 20  # so that it pays to compile
        target.pack_weights()
        self.products = products(target)

    def drafter(self, drafted: int) -> Drafter:
        """A chain of so many tokens."""
        if not drafted:
            return NoDraft()
        return self.head.drafter(self.target, DraftSpec(shape="chain", depth=drafted))

    def parts(self, drafted: int) -> dict[str, float]:
        """Milliseconds of a cycle by part, those of the target's matrices alone, and how many
        tokens were accepted."""
        cfg, rng = self.cfg, torch.Generator().manual_seed(drafted)
        prompt = torch.randint(5, self.target.vocab_size, (cfg.context,), generator=rng).tolist()
        limit, given = (cfg.cycles + 1) * (drafted + 1), []

        def on_tokens(row: int, tokens: list[int], from_draft: list[bool]) -> None:
            given.append(len(tokens))
            engine.rows[0].done |= len(given) > cfg.cycles  # the first one belongs to no cycle

        engine = Engine(
            self.target,
            self.drafter(drafted),
            [Request(prompt, limit)],
            Sampling(0.0),
            on_tokens=on_tokens,
            eos_ids=(),
            clock=time.thread_time,
        )
        parts = engine.run().timing.parts()
        found = {name: 1000 * seconds / cfg.cycles for name, seconds in parts.items()}
        found["matrices"] = 1000 * self.multiplied(drafted + 1)
        return {**found, "accepted": sum(given[1:]) / cfg.cycles - 1}

    @torch.inference_mode()
    def multiplied(self, rows: int) -> float:
        """Seconds in which `rows` vectors go through every matrix of a pass."""
        inputs: dict[int, Tensor] = {}
        for _, width in self.products:
            inputs.setdefault(width, torch.ones(1, rows, width, dtype=self.target.dtype))
        began = time.thread_time()
        for multiply, width in self.products:
            multiply(inputs[width])
        return time.thread_time() - began


def products(target: Target) -> list[tuple[Any, int]]:
    """(matrix as it is multiplied while decoding, width of what it takes) of all linear layers."""
    packed = [getattr(parent, name) for parent, name, _ in target.packing.places]
    if not packed:  # no kernels for it here
        plain = (module for module in target.model.modules() if isinstance(module, nn.Linear))
        return [(module, module.in_features) for module in plain]
    found = {id(layer.product): (layer.product, layer.in_features) for layer in packed}
    return list(found.values())


def measured(cfg: CyclePartsConfig, target: Target, memo: Memo, end: Deadline) -> dict[str, Any]:
    """{layers, bytes of the matrices, .., rounds} of a target. Raises Interrupted at `end`."""
    name = f"layers-{target.num_layers}"
    rounds = range(cfg.rounds + 1)  # the first one warms caches
    if len(memo.lines(name)) < len(rounds):
        linears = (m for m in target.model.modules() if isinstance(m, nn.Linear))
        size = sum(m.weight.numel() * m.weight.element_size() for m in linears)
        cycles = Cycles(cfg, target)
        head = 2 * sum(p.numel() for p in cycles.head.parameters())
        about = {"layers": target.num_layers, "bytes": size, "head_bytes": head}
        memo.once(f"{name}-about", lambda: {**about, "compiled": target.compiled})

        def turn(number: int) -> dict[str, dict[str, float]]:
            end.left()
            return {str(k): cycles.parts(k) for k in cfg.drafted[:: -1 if number % 2 else 1]}

        memo.each(name, rounds, turn)
    return {**memo.lines(f"{name}-about")[0], "rounds": memo.lines(name)[1:]}


@entry("cycle_parts", CyclePartsConfig)
def main(cfg: CyclePartsConfig) -> None:
    """Measure every depth, write."""
    os.chdir(files.ROOT)
    torch.set_num_threads(1)
    end, out = Deadline(cfg.minutes, "cycle_parts"), Path(cfg.out)
    files.check_out(out)
    settings = {k: v for k, v in asdict(cfg).items() if k not in ("out", "minutes")}
    with files.sole_folder(out.with_suffix("")):
        memo = Memo(out.with_suffix("") / "unfinished", settings)
        found: list[dict[str, Any]] = []
        name: str = cfg.shape
        for target in depths(cfg):
            name = name or (target.identity.name if target.identity else cfg.target.kind)
            found.append(measured(cfg, target, memo, end))
            print(json.dumps({"target": name, "layers": found[-1]["layers"]}), flush=True)
        report = {"format": 1, **files.origin(), "target": name, "settings": settings}
        whole = SHAPES[cfg.shape]["num_hidden_layers"] if cfg.shape else found[0]["layers"]
        report["layers"] = whole
        files.write_json(out, {**report, "depths": found})
        memo.clear()


if __name__ == "__main__":
    main()
