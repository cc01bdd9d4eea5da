"""`check`: a running server keeps the contract of an export, or is told where it does not; also
llama.cpp itself, where its environment is there."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.scripts.common.files import ROOT
from outrider.scripts.exporting import contract, contract_check
from outrider.scripts.exporting.contract import Contract, Row
from outrider.scripts.scoring.servers import Endpoint
from tests.helpers.interop import DEEP
from tests.helpers.servers import odd
from tests.helpers.speculating_server import serving

PYTHON = ROOT / ".venv-llamacpp/bin/python"
LIMIT, DEPTH = 24, 3
PROMPTS = [[5, 77, 200, 31], [9, 8, 7], [100, 101, 102, 103, 104, 105], [40]]


@pytest.fixture(scope="module")
def draft() -> Any:
    return load_target(TargetConfig(kind="tiny", **{**DEEP, "layers": 2}), "float32", "cpu")


def test_a_server_keeps_or_breaks_the_contract(target, draft) -> None:
    wanted = contract.expected(target, DraftModel(draft, 3), PROMPTS, 3, LIMIT)
    with serving(target, draft, depth=3) as url:
        found = contract_check.checked(wanted, Endpoint(url))
        assert found["served"] and found["equal"] == len(PROMPTS), found
        accepted = found["acceptance"]["accepted"]
        assert accepted["server"] == accepted["expected"] and not found["not_compared"]
        broken = copy.deepcopy(wanted)
        for row in broken.prompts:
            row.accepted = [min(p, 1) for p in row.proposed]
        found = contract_check.checked(broken, Endpoint(url))
        assert not found["served"] and not found["faults"]
        broken = copy.deepcopy(wanted)
        broken.prompts[1].tokens[4] += 1
        found = contract_check.checked(broken, Endpoint(url))
        assert not found["served"] and "prompt 2: token 5 is" in found["faults"][0]


# --- a server in bfloat16: sound answers part at near ties, and wrong ones are still found


def noisy(dtype: str, seed: int, noise: float = 0.0) -> Target:
    """The tiny target with so much noise on its unembedding, in its own standard deviation."""
    made = load_target(TargetConfig(kind="tiny", seed=seed), dtype, "cpu")
    weight = made.model.lm_head.weight
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        drawn = torch.randn(weight.shape, generator=generator) * weight.float().std() * noise
        weight.add_(drawn.to(weight.dtype))
    return made


def questions(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(3, 259), k=rng.randrange(20, 60)) for _ in range(8)]


@pytest.fixture(scope="module")
def in_16_bits() -> tuple[Contract, Target]:
    wanted = contract.expected(
        noisy("float32", 0), DraftModel(noisy("float32", 0, 0.2), DEPTH), questions(0), DEPTH, 32
    )
    return wanted, noisy("bfloat16", 0)


def checked_against(
    wanted: Contract, target: Target, draft: Target, depth: int = DEPTH
) -> tuple[dict[str, Any], str]:
    with serving(target, draft, depth=depth) as url:
        found = contract_check.checked(wanted, Endpoint(url))
    return found, "\n".join(contract_check.summary(found))


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.02), (1, 0.2)])
def test_a_sound_server_in_bfloat16_keeps_the_contract(seed: int, noise: float) -> None:
    """Whatever its draft accepts: 98 % of its tokens or half of them."""
    target, draft = noisy("float32", seed), noisy("float32", seed, noise)
    wanted = contract.expected(target, DraftModel(draft, DEPTH), questions(seed), DEPTH, 32)
    server = noisy("bfloat16", seed), noisy("bfloat16", seed, noise)
    found, said = checked_against(wanted, *server)
    assert found["served"] and not found["faults"], said
    assert found["equal"] + found["near_ties"] == 8 and "K =" not in said
    assert found["near_ties"] and found["not_compared"] and "part at near ties" in said


def test_a_target_whose_weights_were_changed_is_found(in_16_bits) -> None:
    wanted, _ = in_16_bits
    changed = noisy("bfloat16", 0, 0.3)
    found, said = checked_against(wanted, changed, noisy("bfloat16", 0, 0.2))
    assert not found["served"] and found["faults"], said


def test_another_head_is_found_where_every_answer_parts(in_16_bits) -> None:
    wanted, server = in_16_bits
    found, said = checked_against(wanted, server, noisy("bfloat16", 0, 0.6))
    assert not found["served"] and not found["faults"] and "K =" not in said
    lines = [len(contract_check.summary({**found, "near_ties": ties})) for ties in (7, 8)]
    assert lines[1] == lines[0] + 1  # that nothing was compared whole


def test_a_longer_draft_is_named_where_a_step_shows_it(in_16_bits) -> None:
    wanted, server = in_16_bits
    _, said = checked_against(wanted, server, noisy("bfloat16", 0, 0.2), DEPTH + 2)
    assert f"start it with K = {DEPTH}" in said


def test_the_part_of_an_answer_has_the_cycles_that_lead_to_it() -> None:
    """As the engine itself drafts towards the limit."""
    target, prompts = noisy("float32", 0), questions(0)[:3]
    whole = contract.expected(target, DraftModel(noisy("float32", 0, 0.2), 3), prompts, 3, 20)
    for limit in (2, 7, 19):
        part = contract.expected(target, DraftModel(noisy("float32", 0, 0.2), 3), prompts, 3, limit)
        for row, longer in zip(part.prompts, whole.prompts, strict=True):
            assert longer.counts(limit) == (sum(row.proposed), sum(row.accepted))


# --- the file


HOSTILE = (None, -1, 1.5, 10**400, math.nan, math.inf, "x", {}, [None], [[-1]])


def test_a_contract_is_whole_or_refused(tmp_path: Path, target: Target, draft: Target) -> None:
    """Whatever stands in place of one of its values, or does not stand there at all."""
    wanted = contract.expected(target, DraftModel(draft, 3), PROMPTS[:1], 3, LIMIT)
    place = tmp_path / contract.NAME
    with pytest.raises(UserError, match="^expected: .*expected.json cannot be read"):
        contract.load(tmp_path)
    place.write_text(json.dumps(asdict(wanted)))
    assert contract.load(tmp_path) == wanted
    for within, key in (
        *[("", field.name) for field in fields(Contract)],
        *[("prompts", field.name) for field in fields(Row)],
    ):
        for value in (*HOSTILE, ...):
            broken = asdict(wanted)
            part = broken["prompts"][0] if within else broken
            if value is ...:
                del part[key]
            else:
                part[key] = value
            place.write_text(json.dumps(broken))
            if (key, value) in (("text", "x"), ("format", ...)):
                contract.load(tmp_path)
                continue
            with pytest.raises(UserError, match="^expected: .*; export the head again$"):
                contract.load(tmp_path)


def test_lists_that_do_not_go_together(tmp_path: Path) -> None:
    row = Row([5], [1, 2], "", [2, 1], [1, 0], [[3], []])
    value = asdict(Contract(8, 2, [0], [row, row]))
    for wrong in ({"accepted": [1]}, {"near": [[3]]}):
        rows = [value["prompts"][0], value["prompts"][1] | wrong]
        (tmp_path / contract.NAME).write_text(json.dumps(value | {"prompts": rows}))
        with pytest.raises(UserError, match=r"prompts\.1"):
            contract.load(tmp_path)


# --- engines

SGLANG = {"spec_accept_token_num": 6, "spec_draft_token_num": 9, "spec_verify_ct": 3}


@pytest.mark.parametrize(
    ("counts", "served", "said"),
    [
        (SGLANG, True, "accepted draft tokens: 6 of 9, expected 6 of 9"),
        (SGLANG | {"spec_accept_token_num": 0}, False, "accepted draft tokens: 0 of 9"),
    ],
)
def test_sglang_tells_its_counts_with_every_answer(
    counts: dict[str, Any], served: bool, said: str
) -> None:
    """It has no counters that are read."""
    row = Row([3], [5] * 10, "", [3] * 3, [2] * 3, [[]] * 10)
    wanted = Contract(10, 3, [2], [row])
    about = {"finish_reason": {"type": "length"}, **counts}
    answer = {"output_ids": [5] * 10, "text": "", "meta_info": about}
    with odd(lambda body: answer, "sglang") as server:
        found = contract_check.checked(wanted, Endpoint(server.url))
    assert found["served"] == served and said in "\n".join(contract_check.summary(found))


@contextmanager
def llamacpp(folder: Path, **settings: Any) -> Iterator[str]:
    """The address of a llama.cpp server, which ends with the block."""
    job = folder / "server.json"
    job.write_text(json.dumps(settings))
    run = ROOT / "tests/helpers/llamacpp_run.py"
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [str(PYTHON), str(run), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            said = next((line for line in process.stdout if '"url"' in line), "")
            assert said, (folder / "server.log").read_text()[-2000:]
            yield json.loads(said)["url"]
        finally:
            process.stdin.close()
            process.wait(30)
