"""scripts/export.py: what lands on disk, what is refused, and that no export that differs from
its head survives.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import outrider.scripts.exporting.draft
from outrider.heads import save_head
from outrider.heads.interop import LAYOUTS, engines
from outrider.scripts.export import main
from tests.helpers.interop import DEEP, deep_target, random_head


@pytest.fixture(scope="module")
def target():
    return deep_target()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "a slow horse"}\n{"prompt": "go"}\n')
    return path


def saved(path: Path, target, kind: str, **keys) -> Path:
    save_head(random_head(target, kind, **keys), path / "run/head", target.identity, {"step": 7})
    (path / "run/metrics.jsonl").write_text(
        json.dumps({"event": "start", "data": "9 rows of text"}) + "\n"
    )
    return path / "run"


def run(prompts: Path, *args: str, **shape) -> int:
    shape = {**DEEP, **shape}
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "target=tiny",
                *(f"target.{k}={v}" for k, v in shape.items()),
                f"prompts={prompts}",
                "device=cpu",
                "max_new_tokens=4",
                *args,
            ]
        )
    return int(stop.value.code or 0)


@pytest.mark.parametrize(
    "kind, format",
    [
        ("medusa", "vllm"),
        ("medusa", "medusa"),
        ("eagle1", "sglang"),
        ("eagle3", "vllm"),
        ("eagle3", "speculators"),
        ("eagle1", "eagle"),
    ],
)
def test_an_export_is_whole_checked_and_hashed(
    target, prompts, tmp_path: Path, kind: str, format: str
) -> None:
    source, out = saved(tmp_path, target, kind), tmp_path / "out"
    assert (
        run(prompts, f"drafter={source}", f"format={format}", f"out={out}", "verifier=org/model")
        == 0
    )
    manifest = json.loads((out / "outrider.json").read_text())
    assert set(manifest["files"]) == {p.name for p in out.iterdir()} - {"outrider.json"}
    for name, said in manifest["files"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == said["sha256"], name
    assert manifest["target"]["weights_sha256"] == target.identity.weights_sha256
    assert manifest["check"]["draft_tokens_equal"] == 6 and manifest["check"]["prompts"] == 2
    card = (out / "README.md").read_text()
    assert "9 rows of text" in card and target.identity.tokenizer_sha256 in card
    for line in manifest["serve"]:
        assert line["command"] in card
    if format == "vllm":
        spec = {"medusa": "medusa", "eagle3": "eagle3"}[kind]
        assert (
            f'"method": "{spec}", "num_speculative_tokens": 3' in card
            and "vllm serve org/model" in card
        )
    if format == "speculators":
        assert f"vllm serve {out}" in card
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "kind, name",
    [
        ("medusa", "block_bias"),
        ("eagle1", "o_proj"),
        ("eagle3", "fc_norm"),
        ("eagle3", "d2t"),
        ("eagle3", "input_layernorm"),
    ],
)
def test_a_mutated_export_is_deleted_and_the_command_fails(
    target, prompts, tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    whole = outrider.scripts.exporting.draft.save

    def broken(tensors: dict, path: Path) -> None:
        wanted = {"block_bias": "blocks.1.layers.0.bias"}.get(name, name)
        key = next(k for k in tensors if wanted in k)
        value = tensors[key]
        tensors[key] = value.roll(1, 0) if value.dtype == torch.int64 else value * 1.2
        whole(tensors, path)

    monkeypatch.setattr(outrider.scripts.exporting.draft, "save", broken)
    keys = {"norm_before_fc": True} if kind == "eagle3" else {}
    source, out = saved(tmp_path, target, kind, **keys), tmp_path / "out"
    assert run(prompts, f"drafter={source}", "format=vllm", f"out={out}") == 2
    assert "the export" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_a_wrong_layer_number_in_the_config_is_caught(
    target, prompts, tmp_path: Path, monkeypatch, capsys
) -> None:
    layout = LAYOUTS["vllm", "eagle3"]
    plain = type(layout).config
    monkeypatch.setattr(
        type(layout),
        "config",
        lambda self, head, facts, dtype: {
            **plain(self, head, facts, dtype),
            "eagle_aux_hidden_state_layer_ids": [k + 1 for k in head.taps],
        },
    )
    source = saved(tmp_path, target, "eagle3", taps=[1, 3, 6])
    assert run(prompts, f"drafter={source}", "format=vllm", f"out={tmp_path / 'out'}") == 2
    assert "logits differ" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_then_swapped_as_a_whole(
    target, prompts, tmp_path: Path, capsys
) -> None:
    source, out = saved(tmp_path, target, "medusa"), tmp_path / "out"
    args = (f"drafter={source}", "format=vllm", f"out={out}")
    assert run(prompts, *args) == 0
    (out / "old.txt").write_text("of the first export")
    assert run(prompts, *args) == 2 and "overwrite=true" in capsys.readouterr().err
    assert run(prompts, *args, "overwrite=true", "dtype=bfloat16") == 0
    assert not (out / "old.txt").exists()
    assert load_file(out / "model.safetensors")["lm_heads.0.weight"].dtype == torch.bfloat16
    strange = tmp_path / "home"
    strange.mkdir()
    (strange / "thesis.tex").write_text("all my work")
    (strange / "outrider.json").write_text(
        '{"format": 1}'
    )  # converted targets carry a file of this name too
    assert (
        run(prompts, *args[:2], f"out={strange}", "overwrite=true") == 2
        and (strange / "thesis.tex").exists()
    )
    assert "no export" in capsys.readouterr().err
    assert (
        run(prompts, *args[:2], f"out={source}", "overwrite=true") == 2
        and (source / "head/head.json").exists()
    )


def test_a_failed_overwrite_keeps_the_old_export(
    target, prompts, tmp_path: Path, monkeypatch
) -> None:
    source, out = saved(tmp_path, target, "medusa"), tmp_path / "out"
    args = (f"drafter={source}", "format=vllm", f"out={out}")
    assert run(prompts, *args) == 0
    before = (out / "outrider.json").read_bytes()
    monkeypatch.setattr(
        outrider.scripts.exporting.draft,
        "save",
        lambda tensors, path: save_file({"x": torch.zeros(1)}, path),
    )
    with pytest.raises(KeyError):
        main(
            [
                "target=tiny",
                *(f"target.{k}={v}" for k, v in DEEP.items()),
                f"prompts={prompts}",
                *args,
                "overwrite=true",
            ]
        )
    assert (out / "outrider.json").read_bytes() == before


@pytest.mark.parametrize(
    "kind, format, keys, said",
    [
        ("hydra_heads", "vllm", {}, "served: head=eagle3"),
        ("medusa", "sglang", {}, "format=medusa; format=vllm is for vLLM up to 0.32.0"),
        ("medusa", "vllm", {"markov_rank": 2}, "head.markov_rank=0"),
        (
            "medusa",
            "medusa",
            {"blocks": 2},
            "head.blocks=1, or export with format=vllm (vLLM up to 0.32.0)",
        ),
        ("eagle3", "medusa", {}, "format=vllm or sglang or eagle or speculators"),
        ("eagle3", "eagle", {"norm_output": True}, "format=vllm"),
        ("eagle3", "eagle", {"taps": [1, 3, 6]}, "reads [2, 4, 5] always"),
        ("eagle3", "vllm", {"taps": [5, 2, 4]}, "ascending taps"),
        ("eagle3", "vllm", {"taps": [2, 4, 8]}, "taps below 8"),
        ("eagle3", "vllm", {"layers": 2}, "head.layers=1"),
        ("eagle3", "transformers", {}, "plain transformers folders"),
        ("eagle3", "speculators", {}, "verifier=FOLDER_OR_REPOSITORY"),
    ],
)
def test_what_no_engine_serves_is_refused_with_the_nearest_thing(
    target, prompts, tmp_path: Path, kind: str, format: str, keys: dict, said: str, capsys
) -> None:
    source = saved(tmp_path, target, kind, **keys)
    assert run(prompts, f"drafter={source}", f"format={format}", f"out={tmp_path / 'out'}") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_target_that_the_engine_does_not_serve(prompts, tmp_path: Path, capsys) -> None:
    gpt = deep_target(arch="gpt_neox")
    source = saved(tmp_path, gpt, "eagle3")
    code = run(
        prompts, f"drafter={source}", "format=vllm", f"out={tmp_path / 'out'}", arch="gpt_neox"
    )
    text = capsys.readouterr().err
    assert (
        code == 2
        and "serves no eagle3 head on GPTNeoXForCausalLM" in text
        and "LlamaForCausalLM" in text
    )
    assert "GPTNeoXForCausalLM" not in engines.VLLM_EAGLE3


def test_without_its_target_the_message_says_what_is_needed_of_it(
    target, prompts, tmp_path: Path, capsys
) -> None:
    source = saved(tmp_path, target, "eagle3")
    for format, said in (
        ("speculators", "embed_tokens.weight [V, D]"),
        ("vllm", "none of its tensors"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    "target=local",
                    f"target.path={tmp_path / 'gone'}",
                    f"drafter={source}",
                    f"format={format}",
                    f"out={tmp_path / 'out'}",
                ]
            )
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_the_first_heads_alone(target, prompts, tmp_path: Path) -> None:
    source, out = saved(tmp_path, target, "medusa"), tmp_path / "out"
    assert run(prompts, f"drafter={source}", "format=vllm", f"out={out}", "heads=2") == 0
    assert json.loads((out / "config.json").read_text())["num_heads"] == 2
    assert '"num_speculative_tokens": 2' in (out / "README.md").read_text()


def test_a_separate_draft_is_a_plain_folder(
    target, prompts, tmp_path: Path, monkeypatch, capsys
) -> None:
    from transformers import AutoModelForCausalLM

    from outrider.heads.small_lm.config import SmallLMConfig
    from outrider.heads.small_lm.head import SmallLM

    head = SmallLM.for_target(target, SmallLMConfig(from_target_layers=2, depth=3))
    save_head(head, tmp_path / "run/head", target.identity, {})
    out = tmp_path / "out"
    args = (
        f"drafter={tmp_path / 'run'}",
        "format=transformers",
        f"out={out}",
        "verifier=org/model",
    )
    assert run(prompts, *args) == 0
    assert (
        not (out / "head.json").exists()
        and json.loads((out / "outrider.json").read_text())["kind"] == "small_lm"
    )
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 2
    card = (out / "README.md").read_text()
    assert '"method": "draft_model", "num_speculative_tokens": 3' in card and "STANDALONE" in card
    assert run(prompts, f"drafter={tmp_path / 'run'}", "format=vllm", f"out={tmp_path / 'x'}") == 2
    assert "format=transformers" in capsys.readouterr().err
    whole = outrider.scripts.exporting.draft.save
    monkeypatch.setattr(
        outrider.scripts.exporting.draft,
        "save",
        lambda tensors, path: whole(
            {k: v.flip(0) if "up_proj" in k else v for k, v in tensors.items()}, path
        ),
    )
    assert (
        run(prompts, *args, "overwrite=true") == 2
        and "nothing was written" in capsys.readouterr().err
    )
