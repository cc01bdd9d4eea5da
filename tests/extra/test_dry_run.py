"""scripts/validate.py dry_run=true: sizes of published models, every recipe on its own hardware,
steps as the plan of training makes them, remedies, mistakes in one line; and its counts against two
that owe it nothing: the allocator's record of a real pass, and a count on torch's meta device."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from outrider.conf.errors import UserError
from outrider.conf.schema import CONF, compose
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.packages import TARGETS
from outrider.heads import HEADS
from outrider.heads.batch import Batch
from outrider.scripts.extra.cluster import count as counting
from outrider.scripts.extra.cluster import gpus, models, phantom
from outrider.scripts.extra.cluster import run as running
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.count import PassShape, PassSpec, count
from outrider.scripts.extra.cluster.lengths import blank, lengths_of
from outrider.scripts.extra.cluster.plan import plan
from outrider.scripts.extra.cluster.run import shape_of, with_keys
from outrider.scripts.extra.cluster.steps import fitted, sizes, step_of, trials
from outrider.scripts.extra.cluster.table import table
from outrider.scripts.lab.pages import cluster as page
from outrider.train.facts import limits_of
from outrider.train.texts.batches import BatchPlan
from outrider.train.texts.sharing import Limits
from outrider.train.validate import head_config
from tests.heads.test_ttt_attention import batch_of, held_by_8b
from tests.helpers import faults
from tests.helpers.training import chats
from tests.train.test_sharing import EXCHANGE, MEAN, drawn, rows_of, seconds

pytestmark = pytest.mark.skipif(bool(phantom.missing()), reason=phantom.missing() or "torch has it")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
ON_GPUS = [n for n in RECIPES if not n.startswith("smollm2")]
FAST = (
    "llama31_8b",
    "mistral_7b_medusa",
    "gpt_oss_20b",
)  # 8 s each: a plain, another head, experts
HOURS = ["data synthesis", "start-up", "training", "to the end"]
TINY = ["target=tiny", "target.layers=6", "head.draft_vocab=64", "data.max_length=64", "gpus=1"]


def config(*keys: str) -> DryRunConfig:
    return compose("validate", DryRunConfig, ["data.path=none", *keys])


# Facts
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(models.shipped()))
def test_parameters_are_the_published_ones(name: str) -> None:
    model = models.shipped()[name]
    assert model.size.total == pytest.approx(model.published, rel=1e-9)
    assert 0 < model.size.layer * model.layers * 0.99 < model.size.stacked < model.size.total


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_packaged_targets_hold_as_many_numbers_as_their_config_says(kind: str) -> None:
    model = models.model_of(TargetConfig(kind=kind))
    assert model.size.total == TARGETS[kind].parameters


# Recipes
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        n if n.removesuffix("_eagle3") in FAST else pytest.param(n, marks=pytest.mark.slow)
        for n in RECIPES
    ],
)
def test_a_recipe_fits_its_hardware(name: str) -> None:
    message = page.stated(name)
    assert message, f"{name} states no hardware"
    keys, margin = message
    found = page.predicted(name, keys)
    held = found["memory"]
    assert held["fits"] and held["spare"] >= margin, (name, held)
    assert sum(held["parts"].values()) == held["training"] <= held["peak"]
    assert 0 < found["speed"]["share_of_peak_flops"] < gpus.SHARE_OF_FLOPS
    assert len(table(found).rows) > 10
    if name == "llama31_8b_eagle3":  # 4 rows of 4,096 tokens, 7 steps
        assert found["pass"] == {"rows": 4, "tokens_a_row": 4096} and held["spare"] >= 0.3
        flops = 2 * (found["parameters"] - 128256 * 4096)  # layers and LM head, each once
        assert found["speed"]["flops_a_token"] > flops


def test_a_sharded_target_keeps_three_layers_beside_its_shards() -> None:
    """The one that computes, as it arrived and unpacked, and the next one as it arrives."""
    name = "llama31_70b_eagle3"
    message = page.stated(name)
    assert message and "gpus=8" in message[0]
    size = models.shipped()["meta-llama/llama-3.1-70b-instruct"].size
    kept = 2 * (size.total - size.stacked + size.stacked / 8)
    held = page.predicted(name, message[0])["memory"]["parts"]["target"] - kept
    assert 0 <= held - 3 * 2 * size.layer < size.layer


def test_recipes_for_gpus_size_their_passes_by_tokens() -> None:
    """16k tokens a pass for 8B with 30 % to spare, 4k for 70B with 10 %."""
    sizes = {"llama31_8b_eagle3": (16384, 0.3), "llama31_70b_eagle3": (4096, 0.1)}
    for name in ON_GPUS:
        cfg, message = config(f"experiment={name}"), page.stated(name)
        assert cfg.micro_tokens and not cfg.micro_batch, name
        if name in sizes:
            assert message and (cfg.micro_tokens, message[1]) == sizes[name]


def test_recipes_for_gpus_count_passes_over_the_data() -> None:
    """The steps follow from the rows, assumed or read, as those of the run do."""
    for name in ON_GPUS:
        text = (CONF / "experiment" / f"{name}.yaml").read_text()
        assert "redicted, not measured" in text or "predicted (docs/scaling.md)" in text, name
        assert name.endswith("_long") or "Weights: " in text, f"{name} says no licence"
        assert config(f"experiment={name}").steps == 0
    found = plan(config(*TINY, "steps=0", "epochs=2", "batch_size=8", "rows=100"))
    assert found["data"]["epochs"] == pytest.approx(24 * 8 / 100)


def test_short_conversations_share_a_pass() -> None:
    """Sized by tokens a rank's rows go through together; by rows they do not."""
    base = config(*TINY, "batch_size=8", "row_tokens=16", "row_sigma=0")
    model = models.model_of(base.target)
    lengths, _ = lengths_of(base, model)
    for keys, rows, passes in (
        ({"micro_tokens": 128}, 2, 1),
        ({"micro_batch": 2}, 2, 4),
        ({"micro_tokens": 128, "micro_batch": 1}, 1, 8),
        ({"micro_tokens": 128, "micro_batch": 4}, 2, 2),
        ({"micro_tokens": 8}, 1, 8),
        ({}, 8, 1),
    ):
        cfg = dataclasses.replace(base, **keys)
        step = step_of(*lengths.plan(cfg, 8), 1, limits_of(cfg), lambda size: (1.0, 0.0))
        assert shape_of(cfg, model).rows == rows and step.passes == passes, keys
        assert step.seconds == passes and step.padding == 0 and step.tokens == 128
    fast, slow = (
        plan(dataclasses.replace(base, gpu="l40s-48gb", **keys))["speed"]["tokens_a_second"]
        for keys in ({"micro_tokens": 128}, {"micro_batch": 2})
    )
    assert fast > slow


def test_pieces_between_are_counted_as_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of many pieces are run: the same memory, work and launches as all of them."""
    cfg = config(*TINY, "head=medusa", "head.chunk=32", "head.heads=2")
    gpu, model = gpus.gpu_of("h100-80gb"), models.model_of(cfg.target)
    run = (
        model,
        head_config(cfg.head),
        "bfloat16",
        PassShape(4, 61, 0.8),
        PassShape(4, 61, 0.8),
        True,
    )
    requested = PassSpec(*run, phantom.NAME, gpu.seconds)
    few = count(requested)
    monkeypatch.setattr(phantom.Phantom, "repeat", lambda *_: None)
    less = count(requested)
    calls = []
    monkeypatch.setattr(counting, "RUN", 10**9)
    monkeypatch.setattr(phantom.Phantom, "repeat", lambda self, before, times: calls.append(times))
    all_of_them = count(requested)
    assert not any(calls)
    for name, amount in vars(all_of_them).items():
        if isinstance(amount, dict):
            amount = pytest.approx(amount, rel=1e-9)
        assert getattr(few, name) == amount, name
    assert less.launches["activations"] < few.launches["activations"]


def test_every_recipe_states_its_hardware() -> None:
    for name in RECIPES:
        message = page.stated(name)
        assert message and 0 < message[1] < 1, name


# Counts of others
# -------------------------------------------------------------------------------------------


def test_the_peak_of_8b_is_that_of_an_independent_count() -> None:
    """2 rows of 4,096 tokens, 7 steps: tensors on torch's meta device, followed by other code."""
    cfg = config("head=eagle3", "head.draft_vocab=32000", "head.steps=7", "head.chunk=4096")
    model = models.shipped()["meta-llama/llama-3.1-8b-instruct"]
    gpu = gpus.gpu_of("h100-80gb")
    run = (model, head_config(cfg.head), "bfloat16", PassShape(2, 4096, 0.8), None, False)
    found = count(PassSpec(*run, phantom.NAME, gpu.seconds))
    held = held_by_8b(batch_of(2, 4096, 0.8), chunk=4096)
    mine = found.peak - found.head
    assert mine == pytest.approx(held.peak, rel=0.05), (mine / 1e9, held.peak / 1e9)
    assert mine < 20e9


def allocated(run) -> int:
    """The most bytes that the CPU's allocator held above what it held before, by its own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_peak_of_a_real_pass_is_predicted(kind: str) -> None:
    """A pass of the CPU, predicted from the config alone: within 5 %."""
    given = ["target.hidden=128", "target.heads=4", "target.vocab=4096", "head.draft_vocab=2048"]
    cfg = config("target=tiny", f"head={kind}", "target.layers=4", *given)
    typed = head_config(cfg.head)
    target = load_target(cfg.target, "float32", "cpu")
    head = HEADS[kind].for_target(target, typed, torch.ones(4096, dtype=torch.int64))
    ids = torch.ones(4, 256, dtype=torch.int64)
    loss = torch.ones_like(ids, dtype=torch.bool)
    loss[:, : int(256 * (1 - 0.8))] = False
    batch = Batch(ids, torch.ones_like(loss), loss, torch.arange(4))
    batch = dataclasses.replace(batch, plan=head.plan(batch, 1))
    head.train()

    def once() -> None:
        head.begin_step(1, 2)
        head(batch, target).sum.backward()

    once()
    for p in head.parameters():
        p.grad = None
    real = allocated(once)
    run = (models.model_of(cfg.target), typed, "float32", PassShape(4, 256, 0.8), None, False)
    found = count(PassSpec(*run, "cpu", gpus.gpu_of("cpu-16gb").seconds))
    mine = found.peak - found.head - found.parts.get("batch", 0)
    assert mine == pytest.approx(real, rel=0.05), (mine, real)


# The time of a step
# -------------------------------------------------------------------------------------------

QWEN = "qwen3_8b_eagle3"
TALKS = f"row_tokens={530 * math.exp(0.9**2 / 2):.0f}", "row_sigma=0.9"  # as test_sharing draws


@functools.cache
def qwen(*keys: str) -> dict[str, Any]:
    return page.predicted(QWEN, [*TALKS, *keys])


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_step_takes_what_the_plan_takes_batch_by_batch(ranks: int) -> None:
    """Charged by others' figures, over other rows of the same distribution: within 5 %."""
    rows, steps = rows_of(drawn(20_000)), 60
    executed = BatchPlan(rows, 64, 1, 0)
    slowest = 0.0
    for step in range(steps):
        shares = executed.shares(step, ranks, Limits(tokens=16384))
        slowest += max(seconds(rows, share) for share in shares) / steps
    found = qwen(f"gpus={ranks}")
    speed, data = found["speed"], found["data"]
    assert speed["step_seconds"] == pytest.approx(slowest + EXCHANGE[ranks], rel=0.05)
    assert speed["step_seconds"] == pytest.approx(sum(speed["parts"].values()))
    assert data["tokens_a_row"] == pytest.approx(MEAN, rel=0.01)
    assert 0 < speed["padding"] < 0.1 < 1.02 < speed["slowest_rank"] < 1.3
    said = dict(table(found).rows)["waste"]
    assert f"{speed['padding']:.0%} of the positions are padding" in said
    assert f"{speed['slowest_rank']:.2f} times the mean one" in said
    assert "log-normal of mean 795 and sigma 0.9, cut at 4,096 (assumed)" in said


def test_the_time_of_a_pass_follows_from_four_that_are_counted() -> None:
    """Of passes that were not among them, target and head each."""
    cfg = compose("validate", DryRunConfig, [f"experiment={QWEN}", "data.path=none"])
    model, gpu = models.model_of(cfg.target), gpus.gpu_of("h100-80gb")
    shape = shape_of(cfg, model)
    others = [[600] * 9 + [650] * 11, [300, 260, 280, 240, 310], [2400, 2600, 2500]]
    passes = [*trials(cfg.micro_tokens, shape.tokens, cfg.micro_tokens), *others]
    run = (model, head_config(cfg.head), "bfloat16", shape, None, True)
    found = counting.seconds(PassSpec(*run, phantom.NAME, gpu.seconds), passes, 0)
    size = [sizes(lengths, 0) for lengths in passes]
    for part in (counting.FEATURES, counting.PASS):
        took = [trial[part] for trial in found]
        cost = fitted(size[:4], took[:4])
        for now, real in zip(size[4:], took[4:], strict=True):
            assert sum(map(operator.mul, cost, now)) == pytest.approx(real, rel=0.06), (part, now)


def test_costs_that_made_the_figures_are_found_and_none_is_below_zero() -> None:
    size = [sizes(lengths, 0) for lengths in trials(16384, 4096, 16384)]
    for true in ([0.02, 3e-5, 2e-5, 4e-9], [0.02, 0, 5e-5, 0], [0, 1e-5, 0, 1e-9]):
        took = [sum(map(operator.mul, true, one)) for one in size]
        assert fitted(size, took) == pytest.approx(true, rel=1e-6, abs=1e-15)
    falling = [1.0 / (1 + i) for i in range(4)]
    assert all(cost >= 0 for cost in fitted(size, falling))


def test_a_rank_that_is_slower_is_waited_for() -> None:
    """Rows of 8, 8 and 24 tokens on three ranks; together: in every pass."""
    rows = blank([24, 8, 8])
    cost = lambda size: (size[1], 0.0)
    alone = step_of(BatchPlan(rows, 3, 1, 0), 1, 3, Limits(tokens=24), cost)
    assert (alone.target, alone.seconds, alone.tokens) == pytest.approx((40 / 3, 24, 40))
    assert alone.slowest == pytest.approx(1.8) and alone.padding == 0 and alone.passes == 1
    plan = BatchPlan(blank([24, 8, 8, 8]), 4, 1, 0)
    both = step_of(plan, 1, 2, Limits(rows=1, together=True), cost)
    assert both.passes == 2 and both.seconds == pytest.approx(24 + 8)


def test_more_of_what_costs_takes_longer() -> None:
    eight, sixteen = qwen("gpus=8"), qwen("gpus=16")
    pace = lambda found: found["speed"]["tokens_a_second"]
    assert pace(eight) < pace(sixteen) < 2 * pace(eight)
    even, wide = qwen("gpus=8", "row_sigma=0"), qwen("gpus=8", "row_sigma=1.2")
    assert even["speed"]["padding"] == 0 and even["speed"]["slowest_rank"] == pytest.approx(1)
    assert pace(even) > pace(eight) > pace(wide)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["gpu=a100-80gb", "micro_tokens=4096"])
def test_a_slower_gpu_and_smaller_passes_take_longer(key: str) -> None:
    """Other passes, each of which is counted anew."""
    eight, other = qwen("gpus=8")["speed"], qwen("gpus=8", key)["speed"]
    assert other["step_seconds"] > eight["step_seconds"]


def test_the_whole_is_synthesis_start_and_training() -> None:
    found = qwen("gpus=8")
    written, start, total = found["synthesis"], found["start_up"], found["total"]
    tokens = 500_000 * found["data"]["tokens_a_row"] * 0.8
    assert written["answers"] == 500_000
    assert written["hours"] == pytest.approx(tokens / (256 * 60) / 3600)
    assert 60 <= start["again"] <= 120 and start["again"] < start["first"]
    assert total["training"] == found["speed"]["hours"]
    assert total["hours"] == pytest.approx(
        written["hours"] + start["first"] / 3600 + found["speed"]["hours"]
    )
    assert [name for name, _ in table(found).rows if name in HOURS] == HOURS
    twice = qwen("gpus=8", "concurrency=512")["synthesis"]["hours"]
    assert twice == pytest.approx(written["hours"] / 2)
    assert qwen("gpus=8", "answers=0")["synthesis"]["hours"] == 0


def test_few_rows_a_rank_are_message_with_the_gain_of_more() -> None:
    """64 rows over 64 ranks; none is recommended where there is nothing to win."""
    found = qwen("gpus=64")
    better = found["recommended"]
    assert found["speed"]["slowest_rank"] > 3 and better["rows_a_rank"] >= 8
    assert better["keys"] == {"batch_size": 64 * better["rows_a_rank"]}
    again = qwen("gpus=64", f"batch_size={64 * better['rows_a_rank']}")
    assert again["speed"]["tokens_a_second"] == pytest.approx(better["tokens_a_second"])
    assert again["memory"]["peak"] == better["peak"] and "recommended" not in again
    assert better["times_as_fast"] > 2
    assert f"batch_size={64 * better['rows_a_rank']}" in dict(table(found).rows)["recommended"]
    assert "recommended" not in qwen("gpus=8")


def test_data_that_are_there_are_read(tmp_path: Path) -> None:
    file = chats(tmp_path / "data.jsonl", 48)
    keys = ["data.max_length=96", "data.held_out=0", "data.cache=false", "batch_size=8"]
    cfg = config(*TINY, *keys, f"data.path={file}")
    lengths, message = lengths_of(cfg, models.model_of(cfg.target))
    assert lengths.known is not None and message.rows == 48 and message.answers == 0
    size = lengths.known.lengths.tolist()
    assert lengths.tokens == pytest.approx(statistics.mean(size)) and max(size) <= 96
    assert message.supervised == lengths.known.supervised / sum(size)
    found = plan(cfg)
    assert found["data"]["tokens"] == sum(size) and found["synthesis"]["hours"] == 0
    assert str(file) in found["data"]["lengths"]
    assert lengths.cut(30).plan(cfg, 8)[0].rows.lengths.max() == 30
    with pytest.raises(UserError, match=r"^batch_size: 64 rows, but only 48"):
        plan(dataclasses.replace(cfg, batch_size=64))


def test_a_device_that_was_measured_is_taken_as_it_is(tmp_path: Path) -> None:
    """Its figures are reached, all of them: twice the figures, half the time."""
    file = tmp_path / "mine.json"
    facts = {"name": "mine", "memory": 9e9, "flops": 1e11, "bandwidth": 1e10, "link": 1e9}
    cfg = config(*TINY, "gpus=2", "batch_size=8", f"gpu={file}")
    speeds = []
    for factor in (1, 2):
        figures = {k: v * factor for k, v in facts.items() if k not in ("name", "memory")}
        file.write_text(json.dumps({**facts, **figures, "launch": 1e-9 / factor}))
        found = plan(cfg)
        speeds.append(found["speed"])
        assert found["assumptions"]["share_of_flops"] == 1 and found["gpu"] == "mine"
    once, twice = (speed["step_seconds"] for speed in speeds)
    assert once == pytest.approx(2 * twice, rel=1e-6) and speeds[0]["parts"]["exchange"] > 0
    for text, said in (
        ('{"name": "x"}', "mine.json: memory"),
        (json.dumps({**facts, "flops": 0}), "flops: 0"),
        (json.dumps({**facts, "flop": 1}), "flop"),
        ("{", "is no JSON file"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=said) as error:
            plan(cfg)
        assert "\n" not in str(error.value)


# What to change
# -------------------------------------------------------------------------------------------


def test_remedies_are_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU a little smaller than the run: keys are named with which it fits, and it does."""
    real, timed = running.seconds, list[str]()

    def counted(one: PassSpec, *more: Any) -> Any:
        timed.append(f"{one.typed} {more}")
        return real(one, *more)

    monkeypatch.setattr(running, "seconds", counted)
    base = config(*TINY, "batch_size=4", "eval.every=0", "eval.parity=0")
    whole = plan(dataclasses.replace(base, gpu="l40s-48gb"))["memory"]["training"]
    toy = dataclasses.replace(gpus.GPUS["l40s-48gb"], name="toy", memory=whole - 5e4)
    monkeypatch.setitem(gpus.GPUS, "toy", toy)
    cfg = dataclasses.replace(base, gpu="toy")
    found = plan(cfg)
    keys = found["changes"]["keys"]
    assert not found["memory"]["fits"] and keys
    assert "to change" in dict(table(found).rows)
    again, typed = with_keys(cfg, head_config(cfg.head), keys)
    again = dataclasses.replace(again, head=dataclasses.asdict(typed))
    assert plan(again)["memory"]["fits"]
    small = dataclasses.replace(toy, memory=2.5e9)
    monkeypatch.setitem(gpus.GPUS, "toy", small)
    assert plan(cfg)["changes"]["keys"] == {} and "take a larger gpu" in plan(cfg)["changes"]["why"]
    assert len(timed) == len({*timed}), "a GPU of another size is as fast: nothing is counted anew"


@pytest.mark.parametrize(
    "keys, said",
    [
        (["gpu=h10"], "gpu: 'h10' is not known; did you mean"),
        (["gpus=0"], "gpus: 0 is below 1"),
        (["gpus=7", "batch_size=16"], "batch_size: 16 is no multiple of the 7 ranks"),
        (["shard_target=true"], "shard_target: needs several processes"),
        (["supervised=0"], "supervised: 0"),
        (["margin=1"], "margin: 1"),
        (["rows=0"], "rows: 0"),
        (["row_sigma=-1"], "row_sigma: -1"),
        (["concurrency=0"], "concurrency: 0"),
        (["answer_speed=0"], "answer_speed: 0"),
        (["target=hub", "target.name=nobody/nothing"], "target.name: the config of nobody/nothing"),
        (["target=local", "target.path=/none"], "target.path: /none/config.json is no model's"),
        (["head=small_lm"], "head."),
        (["head=medusa2", "shard_target=true", "gpus=2"], "shard_target: medusa2 changes"),
        (["head.kind=meduza"], "head.kind: unknown kind of head 'meduza'"),
    ],
)
def test_mistakes_are_message_in_a_line(keys: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(config(*TINY, *keys))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_that_makes_no_model_is_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "hidden_size": 8}')
    with pytest.raises(UserError, match="transformers makes no causal language model"):
        plan(config("target=local", f"target.path={tmp_path}", "gpus=1"))


def test_a_pass_too_large_to_count_is_refused() -> None:
    with pytest.raises(UserError, match="^micro_batch: a pass of 1024 x 1024 tokens"):
        PassShape(1024, 1024, 0.8)


def test_a_file_that_cannot_be_written_is_message_before_the_work(tmp_path: Path) -> None:
    from outrider.scripts.common.files import check_out

    (tmp_path / "file").write_text("")
    for out, said in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "cannot write")):
        with pytest.raises(UserError, match=f"^out: .*{said}"):
            check_out(out)
    check_out(tmp_path / "new" / "x.json")


def test_the_command_needs_no_data(tmp_path: Path) -> None:
    out = tmp_path / "new" / "dry.json"
    words = "dry_run=true", *TINY, f"out={out}"
    code = faults.wait(faults.script("scripts/validate.py", *words, said=tmp_path / "said"))
    said = (tmp_path / "said").read_text()
    assert code == 0 and "predicted, not measured" in said and "peak memory" in said, said
    found = json.loads(out.read_text())
    assert found["predicted"] is True and found["command"].startswith("python scripts/validate.py")


def test_the_page_says_what_the_json_says() -> None:
    found = json.loads(page.RESULT.read_text())
    text = page.BLOCK.page.read_text()
    assert found["predicted"] and text.startswith(
        "# From one machine to a cluster\n\n## Qwen3-8B on eight GPUs"
    )
    for name, run in found["recipes"].items():
        message = page.stated(name)
        assert message and run["memory"]["spare"] >= message[1] and run["memory"]["fits"]
