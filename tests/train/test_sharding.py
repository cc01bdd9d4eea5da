"""A sharded target whose weights no rank reads whole: the same weights bit for bit, the same
forward, one whole weight at a time in memory, and what needs whole layers says so.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from outrider.conf.schema import compose
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.shards import Shards, layer_stacks
from outrider.decode.models.tiny import byte_tokenizer
from outrider.heads.registry import head_class
from outrider.train import evaluation, loop, sharding
from outrider.train.config import keys_of
from tests.helpers.archs import build
from tests.helpers.faults import finish
from tests.helpers.training import overrides

# Names of tensors as in the model; experts that the files keep apart; a fused projection;
# transposed weights and buffers; sliding windows. Five rows of 16 make no two equal halves.
ARCHS = {
    "llama": {"tie_word_embeddings": True, "num_hidden_layers": 3, "intermediate_size": 49},
    "mixtral": {},
    "phi3": {},
    "gpt2": {},
    "gemma3_text": {},
    "qwen3_next": {},
    "qwen3_vl": {},
}


def saved(place: Path, arch: str, **keys: Any) -> TargetConfig:
    """A random model of an architecture as a folder with safetensors, its config key."""
    model = build(arch, vocab_size=260, **keys)
    model.save_pretrained(place)
    byte_tokenizer(260).save_pretrained(place)
    return TargetConfig(kind="local", path=str(place))


def run_of(data: Path, out: Path, folder: str, *more: str) -> Any:
    keys = [k for k in overrides(data, out) if not k.startswith(("target", "data.path="))]
    given = ["target=local", f"target.path={folder}", f"data.path={data}", *keys, *more]
    return compose("medusa", keys_of("medusa"), given)


def test_what_is_read_as_shards_is_what_is_read_whole(data: Path, tmp_path: Path) -> None:
    """Two ranks, seven architectures: every weight and buffer bit for bit, and the features."""
    targets = {name: saved(tmp_path / name, name, **keys) for name, keys in ARCHS.items()}
    ids = torch.arange(24).reshape(2, 12) * 7 % 250 + 3
    taps = (1, 2)

    def action() -> None:
        for name, target in targets.items():
            cfg = run_of(data, tmp_path / "run", target.path, "shard_target=true")
            loop.start(cfg.batch_size, cfg.dtype, cfg.device)
            found, said = sharding.loaded(cfg.target, cfg.dtype, torch.device("cpu"), 0, False)
            plain = load_target(target, "float32", "cpu")
            assert found.sharded and "read as shards" in said, (name, said)
            want, got = plain.model.state_dict(), found.model.state_dict()
            assert want.keys() == got.keys()
            parts = 0
            for key, value in got.items():
                if isinstance(value, DTensor):
                    parts += 1
                    half = -(-value.shape[0] // 2)
                    assert value.to_local().shape[0] in (half, value.shape[0] - half)
                    value = value.full_tensor()
                assert torch.equal(value, want[key]), (name, key)
            mine = [p for _, stack in layer_stacks(plain.model) for p in stack.parameters()]
            assert parts == len(mine) > 0
            buffers = dict(plain.model.named_buffers())
            for key, value in found.model.named_buffers():
                assert torch.equal(value, buffers[key]), (name, key)
            mask = torch.ones_like(ids, dtype=torch.bool)
            assert torch.equal(found.features(ids, mask, taps), plain.features(ids, mask, taps))

    assert finish(2, action, tmp_path / "said") == [0, 0], (tmp_path / "said.0").read_text()


def test_a_signal_at_one_rank_ends_the_evaluation_of_a_sharded_target(
    data: Path, tmp_path: Path
) -> None:
    """Both ranks leave with the code of a stopped run, and nothing is written of the evaluation."""
    keys = ("steps=3", "eval.every=1", "eval.prompts=2", "eval.max_new_tokens=200")
    keys += ("target=tiny", "target.layers=2", "target.hidden=32", "data.held_out=0.2")
    cfg = run_of(data, tmp_path / "run", "", *keys, "shard_target=true")

    def action() -> None:
        decode, calls = evaluation.generate, [0]

        def requested(*args: Any, **kwargs: Any) -> Any:
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            message = kwargs["on_tokens"]

            def counted(*some: Any) -> None:
                calls[0] += 1
                message(*some)

            try:
                return decode(*args, **{**kwargs, "on_tokens": counted})
            finally:
                print(f"answers grew {calls[0]} times")

        evaluation.generate = requested  # type: ignore[assignment]  # this process ends here
        loop.fit(cfg, head_class("medusa"))

    assert finish(2, action, tmp_path / "said") == [75, 75], (tmp_path / "said.0").read_text()
    said = (tmp_path / "said.0").read_text()
    assert "stopped at step 1, saved" in said and "answers grew 1 times" in said, said
    assert '"eval"' not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_what_needs_whole_layers_says_why(data: Path, tmp_path: Path) -> None:
    """A head that copies layers of its target reads them whole, and learns as in one process."""
    target = saved(tmp_path / "target", "llama", num_hidden_layers=3)
    keys = ["head.from_target_layers=1", "dtype=float64", "steps=1", "device=cpu"]
    keys += ["data.cache=false", "data.held_out=0.1", "eval.every=0", "eval.parity=0"]
    given = ["target=local", f"target.path={target.path}", f"data.path={data}", "batch_size=4"]
    given += [*keys, "save_every=0", f"out_dir={tmp_path / 'run'}", "shard_target=true"]
    cfg = compose("draft", keys_of("draft"), given)
    assert finish(2, lambda: loop.fit(cfg, head_class("small_lm")), tmp_path / "said") == [0, 0]
    assert (
        "read whole by every rank (head.from_target_layers copies"
        in (tmp_path / "said.0").read_text()
    )


def test_more_ranks_than_rows_leave_some_without(tmp_path: Path) -> None:
    """The parts of all ranks, end to end, are the whole weight, as FSDP2 cuts it."""
    target = saved(tmp_path / "target", "llama", intermediate_size=5, num_hidden_layers=1)
    want = load_target(target, "float32", "cpu").model.model.layers[0].mlp.up_proj.weight
    parts = []
    for rank in range(4):
        shards = Shards(rank, 4, torch.device("cpu"))
        found = load_target(target, "float32", "cpu", shards=shards)
        parts.append(shards.take(found.model.model.layers[0].mlp.up_proj.weight))
    assert [len(part) for part in parts] == [2, 2, 1, 0]
    assert torch.equal(torch.cat(parts), want)
