"""validate dry_run=true: its formula beside peaks that were counted operation by operation on fake
tensors (docs/results/dry_run_peaks.json) and beside one that a GPU measured (first_gpu.json)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.conf.schema import compose
from outrider.scripts.common.files import ROOT
from outrider.train import validate
from outrider.train.config import CONCURRENCY, ValidateConfig
from outrider.train.dry_run import memory, report
from outrider.train.dry_run.answers import servers, speed
from outrider.train.dry_run.models import numbers, shipped
from outrider.train.dry_run.plan import Plan
from outrider.train.flops import peak_flops
from tests.helpers.commands import code_of

COUNTED = json.loads((ROOT / "docs/results/dry_run_peaks.json").read_text())["runs"]


def planned(*keys: str) -> Plan:
    cfg = compose("validate", ValidateConfig, ["dry_run=true", *keys])
    return report.planned(cfg, replace(cfg, head=validate.head_config(cfg.head)))


@pytest.mark.parametrize("name", COUNTED)
def test_the_formula_meets_the_counted_peak(name: str) -> None:
    """Also the weights that learn, and host memory. within: what was reached for this run."""
    counted = COUNTED[name]
    plan = planned(*counted["keys"])
    if "note" not in counted:
        assert numbers(plan.head) == counted["trained_parameters"]
    assert [plan.rows, plan.length] == counted["pass"]
    assert memory.target_bytes(plan)[2] == pytest.approx(counted["host_bytes"], rel=0.01)
    peak = sum(memory.parts(plan).values())
    assert peak == pytest.approx(counted["training_peak_bytes"], rel=counted["within"])


def test_the_formula_meets_the_measured_peak() -> None:
    """On an H200, by the allocator; its data left a draft vocabulary of 18 tokens."""
    found = json.loads((ROOT / "docs/results/first_gpu.json").read_text())
    keys = [k for k in found["keys"] if k.startswith(("target", "batch", "micro", "head", "dtype"))]
    width = found["prediction"]["width"]
    more = ("head=eagle3", "head.draft_vocab=18", f"data.max_length={width}", "supervised=0.97")
    plan = planned(*keys, *more, "gpus=1", "steps=20")
    parts = memory.parts(plan)
    measured = found["training"]["step_peak_memory_bytes"]
    assert sum(parts.values()) - parts["reserve"] == pytest.approx(measured, rel=0.1)
    each = report.flops_a_token(plan, plan.length)
    rate = report.shares_of_peak(each)[1] * 989.4e12 / each
    assert rate == pytest.approx(found["training"]["tokens_per_second"], rel=0.1)


def test_models_have_as_many_parameters_as_their_cards_say() -> None:
    for path in (ROOT / "train/dry_run/models").glob("*.json"):
        said = json.loads(path.read_text())
        model = shipped()[said["repository"].lower()]
        assert numbers(model.built) == pytest.approx(said["parameters"], rel=1e-9), path.name


def test_a_run_that_does_not_fit_is_told_keys_with_which_it_does() -> None:
    large = ("experiment=llama31_70b_eagle3", "shard_target=false")
    fits, said = report.report(planned(*large))
    assert not fits and "DOES NOT FIT\nto change: shard_target=true: " in said
    assert report.report(planned(*large, "gpu=b200-180gb"))[0]
    assert "to change: no key makes it fit" in report.report(planned(*large, "gpu=a100-40gb"))[1]


# Tokens of answers a second of one server in 16 bits, with so many requests at a time (0: as
# many as fit) of so many tokens that answer so many. vLLM, Qwen3-8B:
# github.com/tgarg01/silybench-data, capacity.csv. TensorRT-LLM 0.17, Llama-3.1-8B:
# docs/source/performance/perf-overview.md.
PUBLISHED = [
    ("qwen/qwen3-8b", "h100-80gb", 327, 128, 1024, 13322),
    ("qwen/qwen3-8b", "h100-80gb", 512, 128, 128, 14540),
    ("qwen/qwen3-8b", "h100-80gb", 40, 2048, 2048, 2815),
    ("qwen/qwen3-8b", "h100-80gb", 7, 8192, 512, 501.6),
    ("meta-llama/llama-3.1-8b-instruct", "a100-80gb", 0, 128, 2048, 5256),
    ("meta-llama/llama-3.1-8b-instruct", "a100-80gb", 0, 500, 2000, 4277),
    ("meta-llama/llama-3.1-8b-instruct", "a100-80gb", 0, 1000, 1000, 3787),
    ("meta-llama/llama-3.1-8b-instruct", "a100-80gb", 0, 2048, 128, 799.6),
]


def test_published_servers_reach_the_share_of_the_roofline_that_is_assumed() -> None:
    shares = []
    for name, gpu, requests, asked, answered, reached in PUBLISHED:
        room, known, bandwidth = report.KNOWN["gpus"][gpu]
        model, peak = shipped()[name], peak_flops(known, "bfloat16") or 0
        made = servers(model, 1, (room, peak, bandwidth), asked, answered)
        assert made and made.requests <= CONCURRENCY
        many = requests or made.requests
        shares.append(reached / speed(model, peak, bandwidth, many, asked, answered))
    low, high = report.KNOWN["served"]
    assert low <= min(shares) / 1.23 and max(shares) <= high + 0.01
    assert min(shares) == pytest.approx(0.51, abs=0.005)  # as the report says
    assert max(shares) == pytest.approx(0.76, abs=0.005)


def test_hours_follow_the_hardware_and_what_does_not_fit_has_none() -> None:
    def figures(*keys: str) -> dict[str, list[float]]:
        """Key of a line -> the figures in it."""
        said = report.report(planned("experiment=qwen3_8b_eagle3", "rows=200000", *keys))[1]
        lines = (line.partition(": ") for line in said.splitlines())
        return {k: [float(n) for n in re.findall(r"\d+\.\d+", t)] for k, _, t in lines}

    def answers(*keys: str) -> float:
        return figures(*keys)["answers"][1]

    eight, four = figures("gpus=8"), figures("gpus=4")
    for line in ("answers", "to the end"):
        assert four[line][:2] == pytest.approx([2 * n for n in eight[line][:2]], rel=0.05)
    likely, fast, slow, *_ = eight["training"]
    parts = eight["answers"][0] + fast, eight["answers"][1] + slow
    assert eight["to the end"] == pytest.approx(parts, abs=0.11)
    assert slow > 1.23 * likely
    small = figures("gpus=1", "gpu=rtx4090-24gb")
    assert "to the end" not in small and not small["training"]
    cards = ("h200-141gb", "h100-80gb", "a100-80gb", "a100-40gb", "l40s-48gb", "rtx4090-24gb")
    hours = [answers("gpus=8", f"gpu={card}") for card in cards]
    assert hours[:5] == sorted(set(hours[:5])) and 8 * hours[5] < small["answers"][1]
    brief = answers("data.chat_template_kwargs={enable_thinking: false}")
    assert brief < eight["answers"][1] / 3
    alone = figures("target.name=meta-llama/Llama-3.1-70B-Instruct", "gpus=2", "gpu=h100-80gb")
    assert not alone["answers"] and "to the end" not in alone


@pytest.mark.parametrize(
    ("template", "tokens"), [("{% if enable_thinking is false %}", 2500), ("{{ bos }}", 800)]
)
def test_rows_are_long_where_it_thinks(tmp_path: Path, template: str, tokens: int) -> None:
    config = shipped()["qwen/qwen3-0.6b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    keys = "target=local", f"target.path={tmp_path}", "head=eagle3", "steps=3", "gpus=1"
    assert planned(*keys).cfg.row_tokens == tokens
    assert planned(*keys, "row_tokens=9").cfg.row_tokens == 9


def test_the_command_says_it_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(validate.main, "dry_run=true", "target=tiny", "steps=3", "gpus=1") == 0
    said = capsys.readouterr().out
    table = said.partition("peak of training:")[2].partition("training: ")[0]
    assert ": fits" in said and " GB" in table and not re.search(r"\d [MkT]?B\b", table)
    for key in ("rows", "row_tokens", "supervised", "steps", "epochs", "concurrency"):
        assert re.search(rf"\b{key}\b", said), key
