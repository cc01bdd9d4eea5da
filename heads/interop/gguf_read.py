"""A GGUF file read by the format's own package, whatever is in it: a file that is damaged, cut
off or none is told in one line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from outrider.conf.errors import UserError, first_line


@dataclass
class GgufFile:
    """fields: keys and their values. tensors: float32 or int64,
    shapes as torch has them (slowest dimension first). types: each tensor's type in the file,
    such as q8_0."""

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
    """Keys, and tensors unless told otherwise.

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
