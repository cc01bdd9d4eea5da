"""llama.cpp beside our engine: what is read off its log and its counters, and, where its
environment is there, a real server on a tiny target: same text, same drafts, same acceptance,
and a certificate of its sampled speculation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.decode.drafters import DraftModel, NoDraft
from outrider.decode.engine import Cycle, Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.heads import save_head
from outrider.heads.interop import gguf_write
from outrider.heads.names import DraftSpec
from outrider.scripts.common.files import ROOT
from outrider.scripts.common.memo import Memo
from outrider.scripts.extra.llamacpp import server as llamacpp
from outrider.scripts.lab.serving import llamacpp_cases, steps
from outrider.scripts.lab.serving.case import Runs
from outrider.scripts.scoring.served import ServedSystem
from outrider.scripts.serving import contract, contract_check, gguf_export, server_certificate
from outrider.scripts.serving.asking import MOST_TOP, Address, Endpoint, read_counters
from outrider.scripts.serving.drafter_distributions import drafter_distributions
from tests.helpers.interop import DEEP, biased_qwen2, deep_target, random_head
from tests.helpers.speculating_server import serving

PYTHON = ROOT / ".venv-llamacpp/bin/python"
LIMIT, DEPTH = 24, 3
CHAIN = DraftSpec(shape="chain")
PROMPTS = [[5, 77, 200, 31], [9, 8, 7], [100, 101, 102, 103, 104, 105], [40]]

LOG = """
0.1 D spec draft:  - seq_id 0, draft candidate   0, pos   0:    260 (   0.663) ' the'
0.1 D spec draft:  - seq_id 0, draft candidate   1, pos   0:    253 (   0.248) ' a'
0.1 D spec draft:  - seq_id 0, draft candidate   0, pos   1:    905 (   0.381) ' world'
0.1 D spec common_specu: truncating draft to 1 tokens
0.1 D slot handle_last_: id  0 | task 0 | generate_draft: id=788, #tokens=41, #draft=1, pos_next=41
"""


def test_drafts_are_read_off_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(LOG + LOG.replace("#draft=1", "#draft=2"))
    once, twice = llamacpp.drafts(path)
    assert once == (788, [(260, 0.663)]) and twice == (788, [(260, 0.663), (905, 0.381)])
    assert llamacpp.drafts(path, len(LOG.encode())) == [twice]


def test_cycles_are_read_off_drafts_and_tokens() -> None:
    drafts = [(1, [(2, 0.5), (9, 0.5)]), (3, [(4, 0.9)])]
    cycles = llamacpp_cases.cycles_of({"tokens": [1, 2, 3, 4, 5], "drafts": drafts})
    assert [(c.proposed, c.accepted) for c in cycles] == [(2, 1), (1, 1)]


@pytest.mark.parametrize("prefix", ["vllm:", "llamacpp:"])
def test_counters_of_both_engines(prefix: str) -> None:
    label = '{engine="0",model_name="m"}' if prefix == "vllm:" else ""
    text = (
        f"# HELP x\n{prefix}spec_decode_num_drafts_total{label} 7.0\n"
        f"{prefix}spec_decode_num_draft_tokens_total{label} 21\n"
        f"{prefix}spec_decode_num_accepted_tokens_total{label} 5\n"
        f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 2\n'
        f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 3.0\n'
    )
    assert read_counters(text) == {
        "drafts": 7,
        "draft_tokens": 21,
        "accepted_tokens": 5,
        "accepted_by_position": [3, 2],
    }
    assert read_counters("nothing 1\n") is None


@pytest.fixture(scope="module")
def target():
    return deep_target()


@pytest.fixture(scope="module")
def draft():
    shape = {**DEEP, "layers": 2}
    return load_target(TargetConfig(kind="tiny", **shape), "float32", "cpu")


def test_a_server_keeps_or_breaks_the_contract(target, draft) -> None:
    wanted = contract.expected(target, DraftModel(draft, 3), PROMPTS, 3, LIMIT)
    with serving(target, draft) as url:
        found = contract_check.checked(wanted, Address(url))
        assert found["served"] and found["equal"] == len(PROMPTS), found
        said = "\n".join(contract_check.summary(found))
        assert said.endswith("serves what was trained")
        broken = json.loads(json.dumps(wanted))
        broken["prompts"][1]["tokens"][4] += 1
        found = contract_check.checked(broken, Address(url))
        assert not found["served"] and "prompt 2: token 5 is" in found["parts"][0]
        for rate in broken["acceptance_by_position"][1:]:
            rate["low"] = rate["high"] = 0.99
        found = contract_check.checked(broken, Address(url))
        assert found["acceptance"]["position"] == 2
        assert "it parts at draft position 2" in contract_check.summary(found)


def test_a_server_that_speculates_with_something_else_breaks_it(target, draft) -> None:
    wanted = contract.expected(target, DraftModel(target, 3), PROMPTS, 3, LIMIT)
    with serving(target, draft) as url:
        found = contract_check.checked(wanted, Address(url))
    assert found["equal"] == len(PROMPTS) and not found["served"]
    assert found["acceptance"]["position"] == 1


def test_a_stop_token_is_no_accepted_one(target) -> None:
    tokens, stop = [5, 6, 7, 8, 9, 1], (1, 2)
    cycles = [Cycle(3, 2, (), False, 1), Cycle(2, 2, (), True, 4)]
    counted = contract.until_stop(cycles, tokens, stop)
    assert [(c.proposed, c.accepted, c.start) for c in counted] == [(3, 2, 1), (2, 1, 4)]
    assert contract.until_stop(cycles, [5, 6, 7, 8, 9, 4], stop) == cycles
    assert contract.until_stop(cycles[:1], [5, 6, 7, 1], stop) == cycles[:1], "as the bonus token"
    row = {"ids": [3], "tokens": tokens, "text": "", "proposed": [3, 2], "accepted": [2, 2]}
    wanted = {"stop": stop, "prompts": [row], **contract.rates([cycles])}
    assert contract.cycles_of(wanted)[0][1].start == 4
    answer = {"tokens": tokens[:-1], "text": "", "draft_tokens": 5, "accepted": 3}
    assert contract.verdict(wanted, [answer])["served"]
    counters = {"accepted_by_position": [2, 1, 1]}
    for accepted in (2, 4):
        found = contract.verdict(wanted, [answer | {"accepted": accepted}], counters)
        assert not found["served"] and found["acceptance"]["accepted"]["expected"] == 3
        assert found["acceptance"]["position"] == 3
    counters = {"drafts": 2, "draft_tokens": 5, "accepted_tokens": 4}
    counters["accepted_by_position"] = [2, 2, 0]
    found = contract.verdict(wanted, [answer | {"accepted": None}], counters)
    assert found["served"] and found["acceptance"]["accepted"]["expected"] == 4


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is not JSON"),
        ("[]", "no contract"),
        ('{"format": 1, "prompts": []}', "no contract"),
        ('{"format": 9, "prompts": [{}]}', "no contract"),
        ('{"format": 1, "prompts": [{"ids": []}]}', "no contract"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_contract(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "expected.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(contract.UserError, match=said):
        contract.load(tmp_path if text is not None else path)


WHOLE = gguf_write.tokenizer_fields


def in_letters(*args):
    """Words that spell UTF-8 in any order: the server answers no others."""
    fields = WHOLE(*args)
    kind, words = fields["tokenizer.ggml.tokens"]
    fields["tokenizer.ggml.tokens"] = (kind, [*words[:3], *(f"w{i}" for i in range(3, len(words)))])
    return fields


@contextmanager
def engine(folder: Path, target, head, **changes) -> Iterator[llamacpp.Running]:
    """A real server with the head on the tiny target."""
    kind = gguf_export.Kind("float32")
    prompts = [torch.tensor(p) for p in PROMPTS[:2]]
    folder.mkdir()
    gguf_export.write_model(folder / "target.gguf", target.model, target, prompts, kind)
    gguf_export.write_head(folder, head, target, prompts, kind)
    settings = llamacpp.LlamaServerSettings(
        str(folder / "target.gguf"),
        str(folder / "draft.gguf"),
        llamacpp_cases.METHODS[head.kind],
        DEPTH,
        context=256,
    )
    with llamacpp.running(
        PYTHON, dataclasses.replace(settings, **changes), folder, "case"
    ) as server:
        yield server


@pytest.mark.needs_llamacpp
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, keys",
    [
        ("eagle3", {}),
        ("eagle3", {"norm_joined": True}),
        ("eagle3", {"draft_vocab": 0}),
        ("dflash", {}),
        ("dflash", {"causal": True, "block": 8, "depth": DEPTH}),
        ("dflash", {"draft_vocab": 0, "key_norm": True}),
        ("dspark", {}),
        ("dspark", {"confidence": 0.0, "draft_vocab": 0}),
    ],
)
def test_a_real_server_drafts_what_the_head_drafts(
    target, tmp_path: Path, kind: str, keys: dict, monkeypatch
) -> None:
    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    head = random_head(target, kind, **keys)
    chain = head.drafter(target, CHAIN)
    wanted = contract.expected(target, chain, PROMPTS, DEPTH, LIMIT)
    with engine(tmp_path / "served", target, head) as server:
        found = contract_check.checked(wanted, Address(server.url))
        assert found["kind"] == "llama.cpp" and found["served"], found
        assert found["acceptance"]["accepted"]["server"] >= 0
        drafts = llamacpp.drafts(server.log)
    assert sum(len(path) for _, path in drafts) == sum(
        sum(row["proposed"]) for row in wanted["prompts"]
    )


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_a_real_server_drafts_for_a_qwen2(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    target = biased_qwen2()
    head = random_head(target, "eagle3")
    wanted = contract.expected(target, head.drafter(target, CHAIN), PROMPTS, DEPTH, LIMIT)
    with engine(tmp_path / "served", target, head) as server:
        found = contract_check.checked(wanted, Address(server.url))
    assert found["served"] and found["equal"] == len(PROMPTS), found


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_a_real_server_takes_a_separate_draft(target, draft, tmp_path: Path) -> None:
    kind = gguf_export.Kind("float32")
    some = [torch.tensor(p) for p in PROMPTS[:2]]
    for name, model in (("target.gguf", target), ("draft.gguf", draft)):
        gguf_export.write_model(tmp_path / name, model.model, target, some, kind)
    wanted = contract.expected(target, DraftModel(draft, DEPTH), PROMPTS, DEPTH, LIMIT)
    settings = llamacpp.LlamaServerSettings(
        str(tmp_path / "target.gguf"), str(tmp_path / "draft.gguf"), "SIMPLE", DEPTH, context=256
    )
    with llamacpp.running(PYTHON, settings, tmp_path, "simple") as server:
        found = contract_check.checked(wanted, Address(server.url))
    assert found["served"] and found["equal"] == len(PROMPTS), found
    assert found["acceptance"]["accepted"]["expected"] > 0


@pytest.mark.needs_llamacpp
@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 2])
def test_a_real_server_stops_counting_at_a_stop_token(
    target, tmp_path: Path, monkeypatch, place: int
) -> None:
    """The target as its own draft has every token accepted, one of them ends the answer."""
    prompt = PROMPTS[0]
    whole = generate(target, NoDraft(), [Request(prompt, LIMIT)], Sampling(), eos_ids=())
    tokens = whole.generations[0].token_ids
    end = DEPTH + 1 + place  # of the second cycle's draft
    assert tokens[end] not in tokens[:end]
    monkeypatch.setattr(target, "eos_ids", (tokens[end],))

    def ending(*args):
        kind, _ = WHOLE(*args)["tokenizer.ggml.eos_token_id"]
        return in_letters(*args) | {"tokenizer.ggml.eos_token_id": (kind, tokens[end])}

    monkeypatch.setattr(gguf_write, "tokenizer_fields", ending)
    path = tmp_path / "target.gguf"
    kind = gguf_export.Kind("float32")
    gguf_export.write_model(path, target.model, target, [torch.tensor(prompt)], kind)
    wanted = contract.expected(target, DraftModel(target, DEPTH), [prompt], DEPTH, LIMIT)
    assert wanted["prompts"][0]["accepted"] == [DEPTH, place]
    settings = llamacpp.LlamaServerSettings(str(path), str(path), "SIMPLE", DEPTH, context=256)
    with llamacpp.running(PYTHON, settings, tmp_path, "stops") as server:
        found = contract_check.checked(wanted, Address(server.url))
    assert found["acceptance"]["accepted"]["server"] == DEPTH + place - 1, found
    assert found["served"], found


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_a_case_names_the_first_draft_that_differs(target, tmp_path: Path) -> None:
    head, other = random_head(target, "eagle3"), random_head(target, "eagle3", seed=5)
    (tmp_path / "work").mkdir()
    runs = Runs(target, PROMPTS, LIMIT, 4, tmp_path / "work")
    bench = llamacpp_cases.CaseBench(PYTHON, tmp_path / "work", runs, LIMIT, 1)
    with engine(tmp_path / "served", target, head):
        pass
    settings = llamacpp.LlamaServerSettings(str(tmp_path / "served/target.gguf"), context=256)
    plain = llamacpp_cases.served(bench, "plain", settings, "a")
    draft = str(tmp_path / "served/draft.gguf")
    spec = dataclasses.replace(settings, draft=draft, method="EAGLE3", draft_tokens=DEPTH)
    answer = llamacpp_cases.served(bench, "spec", spec, "b")
    same = llamacpp_cases.case(bench, head.drafter(target, CHAIN), DEPTH, answer, plain)
    assert same["equal"] and same["same_tokens"]["equal"] == len(PROMPTS)
    assert same["traced"][0]["first"] is None and same["traced"][0]["draft_tokens"] > 0
    answer["key"] = {"other": 1}
    wrong = llamacpp_cases.case(bench, other.drafter(target, CHAIN), DEPTH, answer, plain)
    assert wrong["traced"][0]["first"]["position"] >= 1
    assert wrong["same_tokens"]["equal"] == len(PROMPTS)


def certified(server: llamacpp.Running, target, towards) -> dict:
    """6,000 tokens: from 20,000 on plain sampling of this server begins to lean as well
    (docs/engines.md)."""
    how = server_certificate.How(Sampling(0.8), 6000, 32, 2, (1, 2, 8), 1e-3, 0.2, 0.0, 0, 2)
    address = Address(server.url, connections=8)
    watch = lambda *_: None
    return server_certificate.certified(
        target, PROMPTS, how, address, None, Memo(None), watch, towards
    )


def is_sound(found: dict) -> bool:
    assert found["server"]["kind"] == "llama.cpp" and found["server"]["drafted"] > 500
    names = {test["name"] for layer in found["layers"] for test in layer.get("tests", [])}
    assert "distribution of the drafter" in names
    return all(layer["passed"] for layer in found["layers"])


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_a_certificate_of_a_real_server(target, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    head = random_head(target, "eagle3")
    save_head(head, tmp_path / "run/head", target.identity, {})
    towards = drafter_distributions(str(tmp_path / "run"), target, Sampling(0.8))
    with engine(tmp_path / "served", target, head, slots=8) as server:
        found = certified(server, target, towards)
    assert is_sound(found), found["reasons"]


@pytest.mark.needs_llamacpp
@pytest.mark.slow
@pytest.mark.parametrize("probabilistic", [False, True])
def test_a_certificate_of_a_separate_draft(
    target, draft, tmp_path: Path, probabilistic: bool, monkeypatch
) -> None:
    """True rejection sampling: this version draws the tokens of a separate draft from its
    distribution."""
    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    kind = gguf_export.Kind("float32")
    some = [torch.tensor(p) for p in PROMPTS[:2]]
    for name, model in (("target.gguf", target), ("draft.gguf", draft)):
        gguf_export.write_model(tmp_path / name, model.model, target, some, kind)

    def towards(answer):
        text = torch.tensor([[*answer.prompt, *answer.tokens]])
        with torch.no_grad():
            rows = draft.model(text).logits[0, len(answer.prompt) - 1 : -1]
        return (rows / 0.8).softmax(-1)

    files = [str(tmp_path / name) for name in ("target.gguf", "draft.gguf")]
    settings = llamacpp.LlamaServerSettings(
        *files, "SIMPLE", DEPTH, probabilistic, slots=8, context=256
    )
    with llamacpp.running(PYTHON, settings, tmp_path, "sampled") as server:
        found = certified(server, target, towards)
    assert is_sound(found), found["reasons"]


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_distributions_of_a_real_plain_server(target, tmp_path: Path, monkeypatch) -> None:
    import asyncio

    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    path = tmp_path / "target.gguf"
    kind = gguf_export.Kind("float32")
    gguf_export.write_model(path, target.model, target, [torch.tensor(PROMPTS[0])], kind)
    text = [*PROMPTS[0], 90, 41, 17]

    async def requested(url: str):
        async with Endpoint(Address(url)) as door:
            return await door.distributions(text, 4, MOST_TOP)

    with llamacpp.running(
        PYTHON, llamacpp.LlamaServerSettings(str(path), context=256), tmp_path, "x"
    ) as s:
        distributions = asyncio.run(requested(s.url))
    with torch.no_grad():
        rows = target.model(torch.tensor([text])).logits[0].log_softmax(-1)[3:-1]
    assert len(distributions) == len(rows) == 3
    for distribution, row in zip(distributions, rows, strict=True):
        best = row.topk(MOST_TOP)
        assert sorted(distribution, key=lambda t: -distribution[t])[:8] == best.indices[:8].tolist()
        assert max(abs(distribution[t] - float(row[t])) for t in best.indices.tolist()) < 1e-4


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_a_real_server_stands_beside_our_rows(target, tmp_path: Path, monkeypatch) -> None:
    """The same text, its own count of accepted tokens, and no setting that it took otherwise."""
    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    head = random_head(target, "eagle3")
    requests = [Request(prompt, LIMIT, id=i) for i, prompt in enumerate(PROMPTS)]
    plain = generate(target, NoDraft(), requests, Sampling(), batch_size=len(requests))
    with engine(tmp_path / "served", target, head, slots=4) as server:
        served = ServedSystem(target, "x", server.url)
        served.check()
        found = served(requests, Sampling(), 0)
        sampled = served(requests, Sampling(0.9, 20, 0.95, 0.05), 1 << 50)
        once = served([Request(PROMPTS[0], 1)], Sampling(), 0)
    assert [g.token_ids for g in found.generations] == [g.token_ids for g in plain.generations]
    assert served.tells and found.timing.decode_s > 0 and once.timing.decode_s == 0
    assert all(g.finish in ("length", "eos") for g in sampled.generations)


@pytest.mark.needs_llamacpp
@pytest.mark.slow
def test_a_real_server_tells_what_its_cycles_cost(target, tmp_path: Path, monkeypatch) -> None:
    """In bfloat16: every cycle of an answer but the warm ones, of it the draft by the log, and
    what the build uses."""
    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    stage: Any = SimpleNamespace(
        ids=PROMPTS[:2], work=tmp_path, cfg=SimpleNamespace(max_new_tokens=LIMIT)
    )
    prompts, kind = [torch.tensor(p) for p in PROMPTS[:2]], gguf_export.Kind("bfloat16")
    gguf_export.write_model(tmp_path / "target.gguf", target.model, target, prompts, kind)
    gguf_export.write_head(tmp_path, random_head(target, "eagle3"), target, prompts, kind)
    settings = llamacpp.LlamaServerSettings(
        str(tmp_path / "target.gguf"), context=256, talk=steps.TALK, exact=False
    )
    plain = steps.timed(stage, PYTHON, settings)
    assert plain["cycles"] == 2 * (LIMIT - steps.WARM) and plain["draft_ms"] == 0
    drafting = dataclasses.replace(
        settings, draft=str(tmp_path / "draft.gguf"), method="EAGLE3", draft_tokens=DEPTH
    )
    found = steps.timed(stage, PYTHON, drafting)
    assert 10 <= found["cycles"] <= 2 * LIMIT
    assert found["draft_ms"] > 0 and found["cycle_ms"] > 0
    assert "AVX" in found["instructions"] or "NEON" in found["instructions"]


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    import sys

    settings = llamacpp.LlamaServerSettings(str(tmp_path / "absent.gguf"))
    with pytest.raises(
        contract.UserError, match="llama.cpp: the server ended with code"
    ) as message:
        with llamacpp.running(Path(sys.executable), settings, tmp_path, "x"):
            pass
    assert "\n" not in str(message.value)
