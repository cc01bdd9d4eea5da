"""What somebody else wrote, read with care: a folder of JSON and safetensors, or pickles
through torch.load(weights_only=True), and GGUF files by the format's own package.

Nothing in it is trusted: sizes come from the tensors, names stay inside the folder,
and what is missing, cut off or damaged is named.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from huggingface_hub import load_state_dict_from_file
from torch import Tensor

from outrider.conf.errors import UserError, first_line

MANIFEST = "outrider.json"
SAFE = ("model.safetensors", "medusa_lm_head.safetensors")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "model.bin")


@dataclass
class Foreign:
    """config: its config.json ({} without one). files: the weight files read. manifest: ours,
    when we exported it."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: list[str] = field(default_factory=list)
    manifest: dict[str, Any] | None = None

    @property
    def dtype(self) -> str:
        """The floating-point type of the weights by name; float32 when they are mixed."""
        kinds = {t.dtype for t in self.tensors.values() if t.is_floating_point()}
        return str(kinds.pop()).removeprefix("torch.") if len(kinds) == 1 else "float32"


def read_folder(folder: Path) -> Foreign:
    """Read config and weights. Raises UserError that names the missing, cut-off or damaged
    file."""
    if not folder.is_dir():
        raise UserError(
            f"from: {folder} is no folder; give the folder of a head (config.json and its weights)"
        )
    config = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
    manifest = exported(folder)
    names = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        more = _read(folder / name)
        twice = sorted(set(more) & set(tensors))
        if twice:
            raise UserError(
                f"{folder / name}: holds {twice[0]} a second time; the shards are of "
                "different heads"
            )
        tensors |= more
    if not tensors:
        raise UserError(f"{folder}: its weights hold no tensor; fetch the head again")
    return Foreign(folder, config, tensors, names, manifest)


def exported(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that scripts/export.py wrote, None for any other.
    Raises UserError for damaged JSON."""
    if not (folder / MANIFEST).is_file():
        return None
    value = _json(folder / MANIFEST)
    # Converted targets carry a file of this name too.
    return value if "engine_format" in value else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: no readable JSON ({error}); fetch or export the head again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(
            f"{path}: a {type(value).__name__}, not a JSON object; fetch or export the head again"
        )
    return value


def _weight_files(folder: Path) -> list[str]:
    """Return the weight files of a folder, the first kind that is there."""
    for name in (*SAFE, *INDEX, *PICKLES):
        if (folder / name).is_file():
            return _shards(folder, name) if name in INDEX else [name]
    raise UserError(
        f"{folder}: holds no weights ({', '.join((*SAFE, *PICKLES))}): half-written, or not a "
        "head; fetch or export it again"
    )


def _shards(folder: Path, index: str) -> list[str]:
    where = _json(folder / index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{folder / index}: has no weight_map; fetch the head again")
    names = sorted({str(v) for v in where.values()})
    for name in names:
        if Path(name).name != name or name.startswith("."):
            raise UserError(
                f"{folder / index}: names {name!r}, a file outside the folder; do not trust it"
            )
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: {name} is missing, which {index} names: half-written; fetch or export "
                "the head again"
            )
    return names


def _read(path: Path) -> dict[str, Tensor]:
    safe = path.suffix == ".safetensors"
    try:
        value = load_state_dict_from_file(path, "cpu", weights_only=True, safe=safe)
    except Exception as error:  # of many kinds, all of them about this file
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code:
            raise UserError(
                f"{path}: refused: unpickling it would call {code[1]}; ask for a safetensors file"
            ) from None
        fix = "" if safe else ", as safetensors where there is one"
        raise UserError(
            f"{path}: cannot be read ({first_line(error.__cause__ or error)}); cut off or damaged: "
            f"fetch the head again{fix}"
        ) from None
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items()
    ):
        raise UserError(
            f"{path}: holds no plain mapping of names to tensors; ask for a safetensors file"
        )
    return {k: v.contiguous() for k, v in value.items()}


# -- GGUF


@dataclass
class GgufFile:
    """fields: keys and their values. tensors: float32 or int64, shapes as torch has them
    (slowest dimension first). types: each tensor's type in the file, such as q8_0."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


class _Bounded(gguf.GGUFReader):
    """The package's reader takes what is left where a file ends too early, and would count
    through as many entries as a damaged file claims. Here the end is an error."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) < int(count):
            raise ValueError(f"cut off at byte {len(self.data)}")
        return found


def read_gguf(path: Path, with_tensors: bool = True) -> GgufFile:
    """Return keys, and tensors by default.

    Raises UserError in one line for a file that is missing, cut off or not sound."""
    try:
        reader = _Bounded(path)
        known = {k: v for k, v in reader.fields.items() if not k.startswith("GGUF.")}
        fields = {name: value.contents() for name, value in known.items()}
        found = GgufFile(fields)
        for tensor in reader.tensors if with_tensors else ():
            found.tensors[tensor.name] = _decoded(tensor)
            found.types[tensor.name] = tensor.tensor_type.name.lower()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a GGUF file") from None
    except Exception as error:  # other people's code: whatever it raises, the file is wrong
        raise UserError(
            f"{path}: no sound GGUF file ({first_line(error)}); give one that llama.cpp loads"
        ) from None
    return found


def _decoded(tensor: gguf.ReaderTensor) -> Tensor:
    """float32 (int64 for i64) values of a tensor."""
    if tensor.tensor_type == GGMLQuantizationType.I64:
        return torch.from_numpy(np.array(tensor.data))
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
