"""A Qwen2's GGUF file as a `llama` of llama.cpp, number by number: the same packed rows in the
order of that architecture, which hands its layers' inputs to EAGLE-3 and block heads. A server
with such a head on the `qwen2` file ends at its first token (build 11549).

    python scripts/extra/llamacpp/as_llama.py QWEN2.gguf OUT.gguf
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import gguf
import numpy as np
import torch

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.heads.interop.gguf_write import paired

OLD, NEW = "qwen2", "llama"
TURNED = {"attn_q": "head_count", "attn_k": "head_count_kv"}  # part -> heads that it has


def as_llama(source: Path, out: Path) -> None:
    """Write `out`, whole or not at all. Raises UserError for a file of another architecture."""
    reader = gguf.GGUFReader(source)
    known = {name: field for name, field in reader.fields.items() if name[:5] != "GGUF."}
    arch = known["general.architecture"].contents()
    if arch != OLD:
        raise UserError(f"{source}: its architecture is {arch}, not {OLD}; nothing was written")
    with disk.whole(out) as stage:
        writer = gguf.GGUFWriter(stage, NEW)
        for name, field in known.items():
            value = field.contents()
            if name == "general.architecture":
                continue
            name = name.replace(f"{OLD}.", f"{NEW}.", 1) if name.startswith(f"{OLD}.") else name
            if field.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(name, value)
            else:
                writer.add_key_value(name, value, field.types[0])
        for tensor in reader.tensors:
            part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
            rows = tensor.data
            if part in TURNED:
                heads = known[f"{OLD}.attention.{TURNED[part]}"].contents()
                rows = paired(torch.from_numpy(np.array(rows)), heads).numpy()
            writer.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.chmod(stage, 0o644)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        as_llama(Path(sys.argv[1]), Path(sys.argv[2]))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
