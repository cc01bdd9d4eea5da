"""Rows, masks and the order of batches."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from conf.errors import UserError
from decode.identity import sha256_file
from decode.tiny import CHATML, CHATML_WITH_SPANS, byte_tokenizer
from heads import HEADS
from scripts.lib.reliability import record
from tests.malformed import FURTHER, THIRTY, Kind, good
from tests.training import chats, run_config
from train import tokens
from train.config import DataConfig
from train.data import LEFT_OUT, Plan, Rows, load_rows
from train.loop import fit
from train.rows import BadRow, Row, encode, interpret, parse_line

EOS = (2,)
# Drops the reasoning of earlier turns, as Qwen3's does: an earlier answer is not a prefix of the whole.
FORGETFUL = CHATML.replace(
    "message['content']", "(message['content'] if loop.last else message['content'].split('</think>')[-1])")
TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_start|>assistant"},
         {"role": "assistant", "content": "hé, 12!"}, {"role": "user", "content": "more"},
         {"role": "assistant", "content": "no\nmore"}]


def supervised(tokenizer, turns, **row) -> str:
    (ids, mask), *rest = encode(Row("f:1", turns, **row), tokenizer, EOS, 4096)
    assert not rest and len(ids) == len(mask)
    return tokenizer.decode([t for t, on in zip(ids, mask, strict=True) if on])


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_SPANS], ids=["prefix", "tags"])
def test_mask_is_the_assistants_text_and_its_end_of_turn(template: str) -> None:
    tokenizer = byte_tokenizer(template=template)
    assert supervised(tokenizer, TURNS) == "hé, 12!<|im_end|>no\nmore<|im_end|>"
    assert supervised(tokenizer, TURNS, complete=False) == "hé, 12!<|im_end|>no\nmore"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
                .filter(str.strip), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_mask_property_on_any_text(answers: list[str]) -> None:
    """Decoding what is supervised gives the answers, whatever they hold, special tokens' names included."""
    turns = [t for a in answers for t in ({"role": "user", "content": "q"}, {"role": "assistant", "content": a})]
    for template in (CHATML, CHATML_WITH_SPANS):
        got = supervised(byte_tokenizer(template=template), turns)
        assert got == "".join(a + "<|im_end|>" for a in answers)


def test_turns_that_the_template_rewrites_are_not_supervised() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think>b"},
             {"role": "user", "content": "c"}, {"role": "assistant", "content": "<think>y</think>d"}]
    assert supervised(byte_tokenizer(template=FORGETFUL), turns) == "<think>y</think>d<|im_end|>"


def test_all_zero_and_all_one_masks_are_refused() -> None:
    everything = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    with pytest.raises(BadRow, match="every token is supervised"):
        encode(Row("f:7", TURNS), byte_tokenizer(template=everything), (), 4096)
    with pytest.raises(BadRow, match="f:7: no supervised token within data.max_length=9"):
        encode(Row("f:7", TURNS), byte_tokenizer(), EOS, 9)
    blind = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
    with pytest.raises(BadRow, match="as prompt plus answer"):
        encode(Row("f:7", TURNS), byte_tokenizer(template=blind), EOS, 4096)


@pytest.mark.parametrize("kinds", [THIRTY, FURTHER], ids=["thirty", "further"])
def test_every_kind_of_bad_row_is_named_and_the_good_ones_stay(tmp_path: Path, kinds: dict[str, Kind]) -> None:
    assert len(THIRTY) == 30
    check_malformed(tmp_path, kinds, 1, 60)


@pytest.mark.slow
def test_malformed_rows_by_the_thousand(tmp_path: Path) -> None:
    """30 kinds x 100 in 10,000 rows, in an order drawn by chance; then a run on what is left."""
    try:
        good = check_malformed(tmp_path, THIRTY, 100, 7000)
        heads = [train_on(tmp_path / name, tmp_path / f"{name}-run", fraction)
                 for name, fraction in (("clean.jsonl", 0.0), ("mixed.jsonl", 0.3))]
        (first, clean), (second, mixed) = heads
        same = first == second
    except AssertionError as error:
        record("malformed", what=WHAT, result=f"failed: {str(error).splitlines()[0]}", met=False)
        raise
    record("malformed", what=WHAT, met=same and mixed == 3000 and not clean, kinds=len(THIRTY), rows=10000, bad=3000,
           kept=good, result="0 crashes, 3,000 of 3,000 reported at their file:line with the right reason, kept rows "
           f"and the head trained on them {'byte-equal to' if same else 'unlike'} a clean run's")
    assert same and mixed == 3000 and not clean


WHAT = "30 kinds of malformed rows x 100 in a file of 10,000"


def train_on(data: Path, out: Path, fraction: float) -> tuple[str, int]:
    """sha256 of the head that a short run leaves, and how many rows its list says were left out."""
    fit(run_config(data, out, f"data.max_bad_fraction={fraction}", "data.max_length=512"), HEADS["medusa"])
    listed = out / LEFT_OUT
    count = len(listed.read_text().splitlines()) if listed.exists() else 0
    return sha256_file(out / "head" / "head.safetensors"), count


def check_malformed(tmp_path: Path, kinds: dict[str, Kind], times: int, sound: int) -> int:
    """`times` of each kind among `sound` good rows: each reported at its line with its reason, the others as in a file
    without them, and a stop where the limit is lower. The number of kept rows."""
    lines: list[tuple[bytes, str]] = [(make(n), why) for make, why in kinds.values() for n in range(times)]
    lines += [(good(n), "") for n in range(sound)]
    random.Random(0).shuffle(lines)
    clean, mixed = tmp_path / "clean.jsonl", tmp_path / "mixed.jsonl"
    clean.write_bytes(b"".join(line + b"\n" for line, why in lines if not why))
    with mixed.open("wb") as file:
        for line, _ in lines:
            file.write(line + b"\n")
    expected = {f"{mixed}:{i}": why for i, (_, why) in enumerate(lines, 1) if why}
    share = len(expected) / len(lines)
    want, got = load(clean, max_bad_fraction=0.0, max_length=512), load(mixed, max_bad_fraction=share, max_length=512)
    for name in ("ids", "loss", "offsets", "held"):
        assert getattr(got, name).numpy().tobytes() == getattr(want, name).numpy().tobytes(), name
    assert got.lines.tolist() == [i for i, (_, why) in enumerate(lines, 1) if not why]
    found = dict(problem.split(": ", 1) for problem in got.bad)
    assert list(found) == list(expected) and len(found) == len(got.bad)
    for where, why in expected.items():
        assert why in found[where], (where, why, found[where])
    first = re.escape(got.bad[0])
    with pytest.raises(UserError, match=f"^{first}; {len(expected)} of {len(lines)} rows are unusable"):
        load(mixed, max_bad_fraction=share - 1e-6, max_length=512)
    return len(got.lines)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_crash_the_reader(line: bytes) -> None:
    try:
        interpret(parse_line(line), "f:1")
    except ValueError as error:
        assert str(error)


def load(path: Path, **keys) -> Rows:
    cfg = DataConfig(path=str(path), **{"held_out": 0.2, "cache": False, **keys})
    return load_rows(cfg, byte_tokenizer(), EOS, 260, 1024)


def test_too_many_bad_rows_stop_and_name_the_first(tmp_path: Path) -> None:
    path = chats(tmp_path / "d.jsonl", 8)
    lines = path.read_text().splitlines()
    lines[3] = "{broken"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"d.jsonl:4: is not JSON.*1 of 8 rows.*data.max_bad_fraction=0.1"):
        load(path, max_bad_fraction=0.1)
    assert load(path, max_bad_fraction=0.2).lines.tolist() == [1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("content, problem", [("", "holds no rows"), ("\n\n", "holds no rows")])
def test_empty_file(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(UserError, match=problem):
        load(tmp_path / "d.jsonl")
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "none.jsonl")


def test_token_cache_gives_the_same_rows_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl")
    first = load(path, cache=True)
    kept = first.sha256()
    (saved,) = (tmp_path / "cache" / "tokens").iterdir()
    moved = path.rename(tmp_path / "e.jsonl")
    again = load(moved, cache=True)
    assert again.sha256() == kept and again.where(0) == f"{moved}:1"
    damaged = bytearray(saved.read_bytes())
    damaged[-5] ^= 1
    saved.unlink()
    saved.write_bytes(bytes(damaged))
    assert load(moved, cache=True).sha256() == kept
    load(moved, cache=True, max_length=300)
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 2


def test_datasets_folder_and_text_file(tmp_path: Path) -> None:
    import datasets

    path = chats(tmp_path / "d.jsonl", 10)
    want = load(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "disk"))
    got = load(tmp_path / "disk", kind="hub")
    assert got.ids.equal(want.ids) and got.loss.equal(want.loss) and got.where(3) == f"{tmp_path / 'disk'}[train]:3"
    (tmp_path / "t.txt").write_text("one two\nthree\n\n\nfour five six\n")
    text = load(tmp_path / "t.txt", kind="text", held_out=0.0)
    assert text.lines.tolist() == [1, 5] and text.loss.sum() == text.ids.numel() - 2
    with pytest.raises(UserError, match="cannot load"):
        load(tmp_path / "no folder", kind="hub")


def test_held_out_rows_follow_the_prompt_and_are_never_trained_on(tmp_path: Path) -> None:
    rows = load(chats(tmp_path / "d.jsonl", 60))
    assert 0 < rows.held.sum() < 30
    twice = tmp_path / "twice.jsonl"
    twice.write_text((tmp_path / "d.jsonl").read_text() * 2)
    assert load(twice).held.tolist() == rows.held.tolist() * 2
    plan = Plan(rows, 4, 2, 0)
    used = {r for k in range(3 * plan.per_epoch) for r in plan.batch(k)}
    assert not used & set(rows.held.nonzero()[:, 0].tolist())
    prompt = byte_tokenizer().decode(rows.prompt(5))
    assert prompt == "<|im_start|>user\nquestion 5<|im_end|>\n<|im_start|>assistant\n"


def test_batch_k_is_a_function_of_seed_epoch_and_k(tmp_path: Path) -> None:
    rows = load(chats(tmp_path / "d.jsonl", 60))
    plan = Plan(rows, 4, 3, 7)
    steps = list(range(3 * plan.per_epoch))
    want = [plan.batch(k) for k in steps]
    fresh = Plan(rows, 4, 3, 7)
    assert [fresh.batch(k) for k in reversed(steps)] == want[::-1]
    assert [Plan(rows, 4, 3, 8).batch(k) for k in steps] != want
    for e in range(3):
        epoch = sum(want[e * plan.per_epoch : (e + 1) * plan.per_epoch], [])
        assert len(set(epoch)) == len(epoch) == plan.per_epoch * 4
    assert want[: plan.per_epoch] != want[plan.per_epoch : 2 * plan.per_epoch]
    for world in (1, 2, 4):  # the ranks share out the same global batch, in as many micro-batches each
        parts = [plan.micro_batches(5, rank, world, 1) for rank in range(world)]
        assert sorted(r for p in parts for m in p for r in m) == sorted(want[5])
        assert len({len(p) for p in parts}) == 1


def test_rows_sorted_in_windows_waste_little(tmp_path: Path) -> None:
    rows = load(chats(tmp_path / "d.jsonl", 400), held_out=0.0)
    assert Plan(rows, 8, 16, 0).waste(0) < 0.05 < Plan(rows, 8, 1, 0).waste(0)
    batch = rows.batch([0, 5])
    assert batch.mask.sum(1).tolist() == rows.lengths[[0, 5]].tolist()
    assert not batch.ids[~batch.mask].any() and not batch.loss_mask[~batch.mask].any()
    start = int(rows.offsets[5])
    assert batch.ids[1, : int(rows.lengths[5])].equal(rows.ids[start : start + int(rows.lengths[5])].long())
    assert batch.ids.dtype == torch.int64


def test_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch_size: 99 rows"):
        Plan(load(chats(tmp_path / "d.jsonl", 10)), 99, 1, 0)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parquet(folder: Path, rows: list[dict], files: int = 3) -> Path:
    import datasets

    folder.mkdir()
    for i in range(files):
        part = rows[i * len(rows) // files : (i + 1) * len(rows) // files]
        datasets.Dataset.from_list(part).to_parquet(str(folder / f"train-{i:05d}-of-{files:05d}.parquet"))
    return folder


def test_streamed_rows_are_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, hence the same batches and the same meaning of a run, however they were read; spilled or not."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl", 50)
    want = load(path)
    folder = parquet(tmp_path / "data", records(path))
    monkeypatch.setattr("train.tokens.SPILL", 300)
    streamed = load(folder, kind="hub", streaming=True, cache=True)
    assert streamed.sha256() == want.sha256() and streamed.where(3) == f"{folder}[train]:3"
    assert [t.equal(getattr(want, n)) for n in ("ids", "loss", "offsets", "held") for t in [getattr(streamed, n)]]
    assert streamed.counts(260).equal(want.counts(260))
    steps = range(2 * Plan(want, 4, 3, 7).per_epoch)
    assert [Plan(streamed, 4, 3, 7).batch(k) for k in steps] == [Plan(want, 4, 3, 7).batch(k) for k in steps]
    saved = sorted((tmp_path / "cache" / "tokens").iterdir())
    assert len(saved) == 1, "nothing spilled is left behind"
    with safe_open(saved[0], "pt") as file:
        assert file.get_tensor("ids").equal(want.ids) and file.get_tensor("loss").equal(want.loss)
    monkeypatch.setattr("train.data._tokenize", None)
    assert load(folder, kind="hub", streaming=True, cache=True).sha256() == want.sha256()
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    changed = records(path)
    changed[7]["messages"][1]["content"] += "!"
    (folder / "train-00000-of-00003.parquet").unlink()
    parquet(tmp_path / "other", changed)
    (tmp_path / "other" / "train-00000-of-00003.parquet").rename(folder / "train-00000-of-00003.parquet")
    assert load(folder, kind="hub", streaming=True, cache=True).sha256() != want.sha256(), "read again: other bytes"
    with (folder / "train-00001-of-00003.parquet").open("r+b") as broken:
        broken.seek(20)
        broken.write(b"\xff" * 200)
    with pytest.raises(UserError, match=r"data.name: .*cannot (be read beyond row \d+|load)"):
        load(folder, kind="hub", streaming=True, cache=True)
    assert DataConfig(kind="jsonl", path="x", streaming=True).validate()[0].startswith("streaming: only for data=hub")
    assert DataConfig(kind="hub", path="x", streaming=True, cache=False).validate()[0].startswith("streaming: needs")


def test_tokens_that_do_not_fit_into_memory_do_not_have_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's peak while rows are collected stays below twice what may be held, however many there are."""
    monkeypatch.setattr(tokens, "SPILL", 1 << 16)
    monkeypatch.setattr(tokens, "PART", 1 << 16)
    row, mask = [7] * 500, [True] * 500
    peaks = []
    for count in (400, 4000):
        with tokens.TokenWriter(tmp_path) as writer:
            tracemalloc.start()
            for i in range(count):
                writer.add(row, mask, i, False)
            writer.write(tmp_path / "t.safetensors", {})
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 17 * 3600 * 2 + (1 << 16) and peaks[0] < 2_000_000
    found = tokens.mapped(tmp_path / "t.safetensors")
    assert found is not None and found[0]["ids"].numel() == 2_000_000 and bool((found[0]["ids"] == 7).all())
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("spilled", [False, True])
def test_a_full_disk_costs_the_cache_but_not_what_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilled: bool
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl", 20)
    if spilled:
        monkeypatch.setattr(tokens, "SPILL", 100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("os.fsync", full)
    if spilled:
        with pytest.raises(UserError, match="data.cache: the tokens do not go to .*No space left"):
            load(path, cache=True)
    else:
        assert load(path, cache=True).sha256() == load(path).sha256()
    assert not list((tmp_path / "cache" / "tokens").iterdir())


def test_damaged_token_files_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with tokens.TokenWriter(None) as writer:
        writer.add([1, 2, 3], [False, True, True], 1, False)
        writer.add([4], [True], 2, True)
        writer.write(path, {"bad": []})
    whole = path.read_bytes()
    found = tokens.mapped(path)
    assert found is not None and found[0]["offsets"].tolist() == [0, 3, 4] and found[0]["held"].tolist() == [0, 1]
    head = int.from_bytes(whole[:8], "little")
    for i in [*range(8), *range(8, 8 + head, 7), *range(8 + head, len(whole), 3)]:
        damaged = bytearray(whole)
        damaged[i] ^= 0x10
        path.unlink()
        path.write_bytes(damaged)
        again = tokens.mapped(path)
        assert again is None or {k: t.tolist() for k, t in again[0].items()} == {
            k: t.tolist() for k, t in found[0].items()} or i in lines_of(whole, head), i  # fmt: skip
    for size in (0, 4, 8, 20, 8 + head, len(whole) - 1):
        path.unlink()
        path.write_bytes(whole[:size])
        assert tokens.mapped(path) is None


def lines_of(whole: bytes, head: int) -> range:
    """Where the line numbers lie, which name rows in messages and are no part of the hash."""
    begin, end = json.loads(whole[8 : 8 + head])["lines"]["data_offsets"]
    return range(8 + head + begin, 8 + head + end)
