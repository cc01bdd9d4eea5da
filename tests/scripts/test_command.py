"""The command `outrider`: its verbs are the files, its help is light, its words reach the file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.conf.words import USUAL
from outrider.heads.interop import FORMATS
from outrider.scripts import cli
from outrider.scripts.common.files import ROOT
from tests.helpers.chats import chats

HEAVY = ("torch", "transformers", "numpy", "datasets", "accelerate", "httpx", "uvicorn", "wandb")
CALLS = """
import contextlib, io, json, os, runpy, sys
sys.path.insert(0, {root!r})
from outrider.scripts import cli
os.execv = lambda *_: sys.exit("became the file")
path, lines = [*sys.path], []
for words in {requested!r}:
    sys.path[:], words = path, words.split()
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = None
            if words and words[0].endswith(".py"):
                sys.argv = words
                runpy.run_path({root!r} + "/" + words[0], run_name="__main__")
            sys.argv = ["outrider", *words]
            cli.main()
        except SystemExit as end:
            code = end.code
    lines.append([str(code), err.getvalue(), out.getvalue()])
print(json.dumps([lines, [name for name in {heavy!r} if name in sys.modules]]))
"""


def called(requested: list[str], folder: Path) -> list[list[str]]:
    """[exit code, stderr, stdout] of command lines, in a process that has loaded nothing heavy at
    its end."""
    code = CALLS.format(root=str(ROOT), requested=requested, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines, heavy = json.loads(done.stdout.splitlines()[-1])
    assert not heavy
    return typing.cast(list[list[str]], lines)


def test_help_loads_no_framework_and_shows_the_keys_that_matter(tmp_path: Path) -> None:
    verbs = ["train eagle3", *cli.FILES, *(f"train {name}" for name in cli.trainers())]
    words = ["train eagle3 --help", "", "ls heads", *(f"{verb} --help all" for verb in verbs)]
    short, overview, heads, *every = (out for *_, out in called(words, tmp_path))
    assert "evaluate" in overview and "eagle3" in heads
    assert all("Keys (KEY=VALUE" in out and "type: ignore" not in out for out in every)
    few, *known = (
        re.findall(r"^  ([a-z_0-9.]+)=", text.partition("Keys (")[2], re.M)
        for text in (short, *every)
    )
    assert len(few) == 10 and {*few} < {*known[0]} and short.startswith("eagle3: ")
    assert f"--help all shows {len(known[0]) - 10} more" in short and "more." not in every[0]
    assert len(known[0]) == len({*known[0]}) > 80
    assert {*USUAL} <= {key for keys in known for key in keys}, "each is a key of some command"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that would have replaced the process."""
    lines: list[list[str]] = []

    def become(words: list[str]) -> None:
        lines.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(cli, "become", become)
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "")  # a launch sets it
    return lines


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["outrider", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_words_reach_the_file_as_they_are(
    taken: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["target=tiny", "drafters=[none,ngram]", "out=a b", "--multirun"]
    assert call(["evaluate", *keys], monkeypatch) == 0
    assert call(["import", "from=.", "out=y"], monkeypatch) == 0
    sound = [f"data.path={__file__}", "out_dir=y", "steps=1"]
    assert call(["train", "eagle1", *sound], monkeypatch) == 0
    assert call(["train", "medusa", *sound, "--launch", "8"], monkeypatch) == 0
    python, train = sys.executable, ROOT / "train"
    assert taken[0] == [python, "-P", "-m", "outrider.scripts.evaluate", *keys]
    assert taken[1] == [python, "-P", "-m", "outrider.scripts.import_head", "from=.", "out=y"]
    assert taken[2] == [python, str(train / "head.py"), "head=eagle1", *sound]
    assert taken[3][2:6] == ["accelerate.commands.accelerate_cli", "launch", "--num_processes", "8"]
    assert taken[3][-4:] == [str(train / "medusa.py"), *sound]
    assert call(["cache_features", "--launch=2", sound[0], "out=y"], monkeypatch) == 0
    assert taken[4][2:6] == [*taken[3][2:5], "2"]
    assert taken[4][-3:] == [str(ROOT / "scripts/cache_features.py"), sound[0], "out=y"]


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    file = cli.trainers()["medusa"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert "--multi_gpu" not in cli.launched(file, 2, [])
    with pytest.raises(UserError, match="--launch: 4 processes, and 2 devices; give 2"):
        cli.launched(file, 4, [])


@pytest.mark.slow
def test_two_processes_train_from_an_empty_folder(tmp_path: Path) -> None:
    chats(tmp_path / "d.jsonl", 24)
    keys = ["target=tiny", "data.path=d.jsonl", "out_dir=run", "steps=2", "batch_size=4"]
    keys += ["eval.every=0", "dtype=float32", "head.heads=2", "--launch", "2"]
    command = [sys.executable, "-c", "from outrider.scripts.cli import main; main()"]
    done = subprocess.run(
        [*command, "train", "medusa", *keys],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "over 2 rank(s)" in done.stderr, done.stderr
    assert (tmp_path / "run/head").is_dir()


def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ("evalute", "error: evalute: no such verb; did you mean evaluate?"),
        ("train eagel3", "error: eagel3: no such head; did you mean eagle3?"),
        ("train eagle4", "error: eagle4: no such head; did you mean eagle3?"),
        ("ls head", "error: head: no such list; did you mean heads?"),
        ("--bogus", "error: --bogus: no such verb"),
        ("train medusa --launch 0", "error: --launch: "),
        ("train medusa --launch", "error: --launch: "),
    ):
        assert call(words.split(), monkeypatch) == 2
        err = capsys.readouterr().err
        assert err.startswith(message) and len(err.strip().splitlines()) == 1


MISTAKES = {
    "train eagle3 --ttt-length 7": "head.steps is that",
    "certify url=http://h:1 tokens=0": "tokens: 0 should be greater",
    "push runs/eagle3 OWNER/NAME licence=mit": "licence: no such key; did you mean license?",
    "train eagle3 data.path=no.jsonl out_dir=y steps=9": "data.path: no such file no.jsonl",
    "train eagle3 data.path=HERE start=no out_dir=y steps=9": "start: no: no head there",
    "evaluate out=x drafters=[none,runs/no]": "drafters: runs/no: neither none",
    "import from=no out=y": "from: no such folder no",
    # A file of a command, run by itself.
    "train/medusa.py targt=smollm2": "targt: no such key; did you mean target?",
    "train/head.py head=eagle3 data.path=x out_dir=y steps=1 dtype=fp16": "dtype: 'fp16' overflows",
    "scripts/cache_features.py target=tiny data.path=no.jsonl out=y": "data.path: no such file",
}


def test_a_mistake_is_told_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "HERE").touch()
    found = called(list(MISTAKES), tmp_path)
    for (words, said), (code, err, _) in zip(MISTAKES.items(), found, strict=True):
        assert code == "2" and said in err and err.startswith("error: "), (words, err)
        assert err.count("\n") == 1 or " problems in the configuration" in err, (words, err)
    assert {path.name for path in tmp_path.iterdir()} == {"HERE"}


def test_a_sound_command_line_becomes_its_file_and_loads_nothing_before(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for folder in ("head", "export"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "head.json").touch()
    sound = [
        "evaluate target=tiny out=x drafters=[none, ngram]",
        "evaluate target=tiny out=x --multirun seed=1,2",
        "tune target=tiny drafter=ngram out=x",
        "certify target=tiny drafter=ngram out=x",
        "certify url=http://h:1 tokens=5000 seconds=600",
        "validate target=tiny data.path=x steps=3 dry_run=false",
        "validate experiment=qwen3_8b_eagle3 dry_run=true gpus=8 gpu=h100-80gb",
        "cache_features target=tiny data.path=x out=y",
        "export target=tiny drafter=head format=vllm out=y",
        "check url=http://h:1 expected=export",
        "serve target=tiny",
        "chat target=tiny",
        "import from=head out=y",
        "push head OWNER/NAME license=mit",
        "synthesize target=tiny out=x",
        "demo",
        "doctor",
        "doctor gpu=true",
        *(f"train {name} target=tiny data.path=x out_dir=y steps=3" for name in OURS),
    ]
    for words, (code, err, _) in zip(sound, called(sound, tmp_path), strict=True):
        assert code == "became the file" and not err, (words, code, err)


OURS = ("medusa", "eagle3", "dspark", "hydra_heads", "p_eagle")


def test_ls_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    cli.ls(["formats"])
    assert tuple(capsys.readouterr().out.split()) == FORMATS
    for folder, _ in cli.FOLDERS.values():
        assert not folder or all(cli.options(folder).values()), (
            f"a file of conf/{folder} without a first line"
        )
    cli.ls(["targets"])
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == sorted(p.stem for p in (ROOT / "conf/target").glob("*.yaml"))
