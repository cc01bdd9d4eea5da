"""scripts/lab/engines.py without an engine: our cycles are counted as an engine counts, and the
tables say what the JSON says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.scripts.lab.serving import case as engine_case
from outrider.scripts.serving import loaders
from outrider.scripts.serving import probe as acceptance_probe
from tests.helpers.interop import DEEP, MASK, deep_target, folder, random_head

LIMIT, K = 12, 3


@pytest.fixture(scope="module")
def target():
    return deep_target()


def simulated(target, path: Path, prompts: list[list[int]]) -> dict:
    """What a plain engine would do with an export: draft K, take the longest right prefix and
    one token more, count all of it, stop after the stop token or the limit. Written apart from
    our engine and our drafters."""
    embed, lm_head = target.model.get_input_embeddings().weight, target.lm_head_weight
    served = loaders.folder(path, "vllm", embed, lm_head, target.num_layers)
    answers, drafts, hits = [], 0, [0] * K
    for prompt in prompts:
        ids = list(prompt)

        def following(ids: list[int]) -> int:
            with torch.no_grad():
                return int(target.model(torch.tensor([ids])).logits[0, -1].argmax())

        ids.append(following(ids))
        while len(ids) - len(prompt) < LIMIT and not set(ids[len(prompt) :]) & set(target.eos_ids):
            known = torch.tensor(ids)

            def features(taps: tuple[int, ...], known: torch.Tensor = known) -> torch.Tensor:
                return target.features(
                    known[None, :-1], torch.ones(1, len(known) - 1, dtype=torch.bool), taps
                )[0]

            draft = served.draft(known, features, K).tokens.tolist()
            drafts += 1
            for depth, token in enumerate(draft):
                right = following(ids)
                ids.append(right)
                if right != token:
                    break
                hits[depth] += 1
            else:
                ids.append(following(ids))
        out = ids[len(prompt) :][:LIMIT]
        stop = next((i + 1 for i, t in enumerate(out) if t in target.eos_ids), LIMIT)
        answers.append(out[:stop])
    counters = {
        "vllm:spec_decode_num_drafts": drafts,
        "vllm:spec_decode_num_accepted_tokens": sum(hits),
        "vllm:spec_decode_num_accepted_tokens_per_pos": hits,
    }
    return {
        "tokens": answers,
        "counters": counters,
        "laps": [[10, 2.0], [8, 1.0]],
        "versions": {"vllm": "0"},
    }


@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
def test_cycles_are_counted_as_an_engine_counts_them(target, tmp_path: Path, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 259, (n,), generator=generator).tolist() for n in (3, 5, 4, 6)]
    head = random_head(target, kind, **({"heads": K} if kind == "medusa" else {"draft_vocab": 64}))
    if kind == "medusa":  # the LM head itself guesses well now and then
        head.proj.data[:] = target.lm_head_weight
        head.block_weight.data.zero_(), head.block_bias.data.zero_()
    answer = simulated(target, folder(tmp_path / "a", target, head, "vllm"), prompts)
    plain = {**answer, "laps": [[10, 4.0], [8, 2.0]]}
    runs = engine_case.Runs(target, prompts, LIMIT, 2, tmp_path)
    found = runs.case(head, "x", K, answer, plain)
    assert found["same_tokens"] == {"answers": 4, "equal": 4, "ties": 0, "different": []}
    assert found["cycles"]["ours"] == found["cycles"]["engine"] > 4
    assert found["accepted_by_position"]["ours"] == found["accepted_by_position"]["engine"]
    assert found["accepted_length"]["ours"]["mean"] == pytest.approx(
        found["accepted_length"]["engine"]
    )
    assert found["accepted_length"]["within"] and found["speed_against_plain"][
        "mean"
    ] == pytest.approx(2.0)
    assert runs.case(head, "x", K, answer, plain) == found  # from WORK
    answer["tokens"][1] = [*answer["tokens"][1][:-1], 3]
    assert runs.case(head, "x", K, answer, plain)["same_tokens"]["equal"] == 3


def test_the_table_shows_every_case(target) -> None:
    case = {
        "case": "eagle3-vllm",
        "draft_tokens": 3,
        "same_tokens": {"answers": 50, "equal": 49, "ties": 1, "different": []},
        "accepted_length": {
            "ours": {"mean": 1.9, "low": 1.8, "high": 2.0},
            "engine": 1.91,
            "within": True,
        },
        "cycles": {"ours": 10, "engine": 10},
        "accepted_by_position": {"ours": [6, 3, 1], "engine": [6, 3, 1]},
        "tokens_per_second": 12.5,
        "speed_against_plain": {"mean": 1.31, "low": 1.2, "high": 1.4},
    }
    plain = {
        "case": "plain",
        "same_tokens": {"answers": 50, "equal": 50, "ties": 0, "different": []},
        "tokens_per_second": 9.5,
    }
    report = {
        "engine": {"vllm": "0.32.0"},
        "cases": [plain, case],
        "settings": {"num_prompts": 50, "max_new_tokens": 64},
    }
    text = engine_case.table(report).markdown()
    assert "| plain |  | 50/50 | – | – | – | – | 9.5 | – |" in text
    assert (
        "| eagle3-vllm | 3 | 49/50 +1≈ | 1.900 [1.800, 2.000] | 1.910 | 60.0% 30.0% 10.0% |" in text
    )
    assert "12.5 | 1.31× |" in text


def breakages(foreign, head) -> Iterator[tuple[str, Any]]:
    """(the convention that mends it, the folder broken in a way that leaves no trace in names,
    shapes and dtypes)."""
    yield acceptance_probe.AS_WRITTEN, foreign
    if head.kind == "eagle3":
        for step, mend in ((-1, "taps_plus_1"), (1, "taps_minus_1")):
            ids = [tap + step for tap in head.taps]
            yield (
                mend,
                replace(
                    foreign, config={**foreign.config, "eagle_aux_hidden_state_layer_ids": ids}
                ),
            )
        yield (
            "fc_210",
            edited(foreign, "fc.weight", lambda t: torch.cat(t.chunk(3, 1)[::-1], 1)),
        )
    if head.kind == "eagle1":
        swapped = edited(foreign, "fc.weight", lambda t: torch.cat(t.chunk(2, 1)[::-1], 1))
        yield "fc_halves", swapped
    if head.kind == "medusa":
        yield (
            "transpose_blocks",
            edited(foreign, "layers.0.weight", lambda t: t.T.contiguous()),
        )
    else:
        weight = next(t for n, t in foreign.tensors.items() if n.endswith("o_proj.weight"))
        if weight.shape[0] == weight.shape[1]:
            yield (
                "transpose_o_proj",
                edited(foreign, "o_proj.weight", lambda t: t.T.contiguous()),
            )


def edited(foreign, name: str, edit) -> Any:
    tensors = {n: edit(t) if n.endswith(name) else t for n, t in foreign.tensors.items()}
    return replace(foreign, tensors=tensors)


def test_every_breakage_has_the_convention_that_mends_it(target, tmp_path: Path) -> None:
    from outrider.heads.interop import detect, read_folder

    for kind in ("medusa", "eagle1", "eagle3"):
        head = random_head(target, kind)
        foreign = read_folder(folder(tmp_path / kind, target, head, "vllm"))
        layout = detect(foreign, "auto")
        done = 0
        for mend, broken in breakages(foreign, layout.read(foreign, target)):
            read = layout.read(broken, target)
            if mend != acceptance_probe.AS_WRITTEN:
                read = {n: t for n, _, t in acceptance_probe.conventions(read)}[mend]
                done += 1
            assert json.dumps(read.taps) == json.dumps(head.taps)
            whole = layout.read(foreign, target)
            assert all(
                a.equal(b)
                for a, b in zip(
                    read.state_dict().values(), whole.state_dict().values(), strict=True
                )
            )
        assert done >= 1


def test_the_command_from_export_to_json(tmp_path: Path, monkeypatch, capsys) -> None:
    """Everything but the engine itself, which `simulated` stands for, and the speculators
    package.
    """
    from outrider.heads import save_head
    from outrider.scripts.lab.serving import shared, vllm

    target, jobs = deep_target(), {}
    heads: dict[str, tuple[str, dict]] = {
        "medusa": ("medusa", {"heads": K}),
        "eagle3": ("eagle3", {}),
        "p_eagle": ("eagle3", {"parallel": True, "steps": K, "mask_token": MASK}),
        "dflash": ("dflash", {"block": K + 1}),
        "dflash_causal": ("dflash", {"block": K + 1, "causal": True, "depth": K}),
        "eagle3-2": ("eagle3", {"seed": 1}),
    }
    for name, (kind, more) in heads.items():
        save_head(random_head(target, kind, **more), tmp_path / name / "head", target.identity, {})
    (tmp_path / "p.jsonl").write_text('{"prompt": "go"}\n{"prompt": "a horse"}\n')

    def engine(cfg, work: Path, name: str, job: dict) -> dict:
        given = Path((job["speculative"] or {"model": job["model"]})["model"] or ".")
        jobs[name] = job["speculative"]
        if name == "plain":
            runs = engine_case.Runs(target, job["prompts"], LIMIT, 2, work)
            return {
                "tokens": runs.plain,
                "counters": {},
                "laps": [[5, 1.0]],
                "versions": {"vllm": "0"},
            }
        answer = simulated(target, given, job["prompts"])
        return {**answer, "laps": [[5, 0.5]]}

    monkeypatch.setattr(vllm, "answered", engine)
    monkeypatch.setattr(shared, "call", lambda command, log: exported(command))
    monkeypatch.setattr(vllm, "FORMATS", dict.fromkeys(vllm.FORMATS, ("vllm",)))

    def exported(command: list[str]) -> None:
        from outrider.scripts.export import main

        with pytest.raises(SystemExit) as stop:
            main([*command[2:], f"prompts={tmp_path / 'p.jsonl'}"])
        assert not stop.value.code

    args = [
        "target=tiny",
        *(f"target.{k}={v}" for k, v in DEEP.items()),
        f"prompts={tmp_path / 'p.jsonl'}",
        f"drafters=[{','.join(str(tmp_path / name) for name in (*heads, 'none'))}]",
        f"work={tmp_path / 'work'}",
        f"out={tmp_path / 'engines.json'}",
        f"max_new_tokens={LIMIT}",
        "engine=README.md",
        "speculators=README.md",
    ]
    with pytest.raises(SystemExit) as stop:
        vllm.main(args)
    assert stop.value.code == 3 and "not there" in capsys.readouterr().err
    report = json.loads((tmp_path / "engines.json").read_text())
    assert [c["case"] for c in report["cases"]] == ["plain", *(f"{name}-vllm" for name in heads)]
    assert {job["method"] for name, job in jobs.items() if "dflash" in name} == {"dflash"}
    parallel = {name for name, job in jobs.items() if job and "parallel_drafting" in job}
    assert parallel == {"p_eagle-vllm"} and jobs["p_eagle-vllm"]["method"] == "eagle3"
    for case in report["cases"][1:]:
        assert case["same_tokens"]["equal"] == 2 and case["draft_tokens"] == K
        assert case["accepted_by_position"]["ours"] == case["accepted_by_position"]["engine"]
