"""One run, many layouts: micro-batches, processes, stored features and a sharded
target change nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.heads.registry import head_class
from outrider.scripts import cache_features
from outrider.train import loop, setup
from outrider.train.accelerator import check_ranks
from outrider.train.config import keys_of
from outrider.train.loop import fit
from tests.helpers.commands import code_of
from tests.helpers.faults import finish, ranks, wait
from tests.helpers.training import TINY

SHAPE = {**TINY, "layers": 4}
STEPS = 4
COMMON = ["target=tiny", "data.held_out=0.1", "data.cache=false", "device=cpu"]
COMMON += [f"target.{k}={v}" for k, v in SHAPE.items()]


def configured(data: Path, out: Path, *more: str) -> Any:
    """A run in float64 on a tiny target: of EAGLE-3 where head=eagle3 is among the overrides,
    else of Medusa."""
    name, schema = (
        ("eagle", keys_of("eagle")) if "head=eagle3" in more else ("medusa", keys_of("medusa"))
    )
    keys = "dtype=float64 batch_size=8 save_every=0 log_every=1 optim.clip=1.0 optim.lr=3e-3"
    args = [f"out_dir={out}", f"steps={STEPS}", *COMMON, *keys.split(), f"data.path={data}"]
    args += ["head.draft_vocab=0", "eval.every=0", "eval.parity=0", *more]
    return compose(name, schema, args)


def watched(data: Path, out: Path, *more: str) -> tuple[dict[int, float], list[torch.Tensor]]:
    """Losses of a run by step, unrounded, and the gradients that its first update sees."""
    cfg, found, original = configured(data, out, *more), {}, loop._report
    grads: list[torch.Tensor] = []
    step = torch.optim.AdamW.step

    def report(run, *rest):
        total, count = run.state.window["loss"]
        found[run.state.step] = total / count
        original(run, *rest)

    def first(self, closure=None):
        if not grads:
            grads.extend(p.grad.clone() for group in self.param_groups for p in group["params"])
        return step(self, closure)

    loop._report, torch.optim.AdamW.step = report, first
    try:
        fit(cfg, head_class(cfg.head.kind))
    finally:
        loop._report, torch.optim.AdamW.step = original, step
    return found, grads


def losses(data: Path, out: Path, *more: str) -> dict[int, float]:
    """Losses of a run by step, unrounded."""
    return watched(data, out, *more)[0]


def in_two_processes(data: Path, out: Path, runs: dict[str, list[str]]) -> dict[str, Any]:
    """What `watched` finds in every run by two real processes over gloo; both ranks must tell
    the same."""
    out.mkdir(parents=True, exist_ok=True)

    def action() -> None:
        found, rank = {}, os.environ["RANK"]
        Accelerator.end_training = lambda self: None  # type: ignore[assignment]  # all runs share it
        for name, keys in runs.items():
            found[name], grads = watched(data, out / name, *keys)
            assert PartialState().num_processes == 2
            torch.save(grads, out / f"{name}-{rank}.pt")
        (out / f"rank{rank}.json").write_text(json.dumps(found))
        PartialState().destroy_process_group()

    codes = [wait(child, 1500) for child in ranks(2, action, out / "said")]
    assert codes == [0, 0], "".join(path.read_text()[-3000:] for path in out.glob("said*"))
    one, two = (json.loads((out / f"rank{r}.json").read_text()) for r in range(2))
    assert one == two
    grads = {
        name: [torch.load(out / f"{name}-{r}.pt", weights_only=True) for r in range(2)]
        for name in runs
    }
    assert all(torch.equal(a, b) for pair in grads.values() for a, b in zip(*pair, strict=True))
    return {
        name: ({int(k): v for k, v in found.items()}, grads[name][0]) for name, found in one.items()
    }


def apart(one: Any, other: Any) -> float:
    """Largest difference of the losses, absolute, or of the first step's gradients, relative."""
    assert list(one[0]) == list(other[0])
    losses = [abs(one[0][k] - other[0][k]) for k in one[0]]
    pairs = zip(one[1], other[1], strict=True)
    return max(*losses, *(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs))


def stored(data: Path, out: Path, *more: str) -> Path:
    """The features of a run of `configured`, on disk."""
    args = [f"data.path={data}", f"out={out}", *COMMON, *more]
    assert code_of(cache_features.main, *args) == 0
    return out


def test_layouts_give_the_same_losses(data: Path, tmp_path: Path) -> None:
    """Every layout of a run beside the plain one, and the sharded target beside whole ones."""
    head = ["head=eagle3", "head.steps=2"]
    features = stored(data, tmp_path / "features", "dtype=float64", "heads=[eagle3]")
    plain = watched(data, tmp_path / "plain", *head)
    assert plain[0][STEPS] < plain[0][1]
    here = {
        "one by one": ["micro_batch=1"],
        "by tokens": ["micro_tokens=70"],
        "stored features": [f"data.features={features}", "micro_batch=3"],
    }
    there = {
        "two ranks": ["micro_batch=2"],
        # one pass of the first step on a rank, two on the other
        "two ranks by tokens": ["micro_tokens=320"],
        "sharded target": ["shard_target=true", "micro_batch=2"],
        "sharded by tokens": [
            *("shard_target=true", "micro_tokens=90"),
            *("eval.every=3", "eval.prompts=2", "eval.max_new_tokens=4"),
        ],
    }
    found = {name: watched(data, tmp_path / name, *head, *more) for name, more in here.items()}
    runs = {name: [*head, *more] for name, more in there.items()}
    found |= in_two_processes(data, tmp_path / "two", runs)
    far = {name: apart(plain, one) for name, one in found.items()}
    assert all(one <= 1e-9 for one in far.values()), far


def test_groups_of_ranks_hold_copies_and_layers_ask_for_the_next(
    data: Path, tmp_path: Path
) -> None:
    """Four ranks, two copies of the target: the losses of one process; every layer but the last
    asks for its neighbour's weights from the second pass on, all on the same streams (else the
    allocator keeps a layer's memory once for each), and what it holds is a half."""
    keys = ("dtype=float64", "target.layers=3", "steps=3", "batch_size=4")
    want = losses(data, tmp_path / "want", *keys)

    def action() -> None:
        seen: dict[str, Any] = {}
        shard = setup.shard_target

        def watching(target: Any, *rest: Any) -> str:
            said = shard(target, *rest)
            seen.update(said=said, layers=target.body.layers)
            return said

        setup.shard_target = watching  # type: ignore[assignment]  # this process ends here
        found = losses(
            data, tmp_path / "got", *keys, "shard_target=true", "shard_group=2", "device=cpu"
        )
        states = [layer._get_fsdp_state() for layer in seen["layers"]]
        assert [len(s._states_to_forward_prefetch) for s in states] == [1, 1, 0]
        groups = [group for s in states for group in s._fsdp_param_groups]
        assert all(s._is_root for s in states) and len(groups) == len(states)
        assert len({*(s._comm_ctx for s in states), *(g.comm_ctx for g in groups)}) == 1
        weight = next(seen["layers"][0].parameters())
        assert weight.to_local().numel() * 2 == weight.numel()
        assert "over 2 ranks, 2 copies" in seen["said"]
        if os.environ["RANK"] == "0":
            (tmp_path / "losses.json").write_text(json.dumps(found))

    assert finish(4, action, tmp_path / "said") == [0] * 4, (tmp_path / "said.0").read_text()
    got = {int(k): v for k, v in json.loads((tmp_path / "losses.json").read_text()).items()}
    assert got.keys() == want.keys() and all(abs(got[k] - want[k]) < 1e-9 for k in want)

    with pytest.raises(UserError, match="shard_group: 3"):
        check_ranks(4, 3, 2)


def test_one_process_cannot_shard(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shard_target: needs several processes"):
        losses(data, tmp_path / "run", "shard_target=true")
