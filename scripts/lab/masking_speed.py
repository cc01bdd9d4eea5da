"""What masking costs here: megabytes of text a second, by one process and by two.

    python -m tests.helpers.traffic runs/traffic.jsonl 20000
    python scripts/lab/masking_speed.py runs/traffic.jsonl

Writes docs/results/masking-speed.json: for each number of processes the wall and CPU seconds of
looking and of masking, and the rules that cost most where one process does it all. On a machine
with other work to do the CPU seconds are what counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.jsonl import parse_line, read_lines
from outrider.scripts.common import files
from outrider.scripts.extra.masking import across
from outrider.scripts.extra.masking.masker import texts
from outrider.scripts.extra.masking.needed import folded, may_match
from outrider.scripts.synthesis.config import REGIONS

OUT = files.ROOT / "docs/results/masking-speed.json"
COSTLY = 6  # rules that are named
Spent = tuple[float, float]


def values(path: Path) -> list[Any]:
    """What is masked of every line that can be read."""
    from outrider.scripts.extra.logs import forms  # torch with it, which no worker needs

    found = []
    for number, line in read_lines(path, "logs"):
        try:
            one = forms.read(parse_line(line), str(number), "category")
        except (forms.Unusable, ValueError):
            continue
        if isinstance(one, forms.Exchange):
            found.append([[*one.request, one.answer], one.tools, one.category])
    return found


def now() -> Spent:
    """(wall, CPU) seconds; those of workers that have ended count."""
    wall = time.perf_counter()
    while multiprocessing.active_children():  # what is left of workers whose work is done
        time.sleep(0.01)
    return wall, sum(os.times()[:4])


def since(begun: Spent) -> dict[str, float]:
    """Seconds since then."""
    end = now()
    return {"seconds": round(end[0] - begun[0], 2), "cpu_seconds": round(end[1] - begun[1], 2)}


def timed(found: Sequence[Any], workers: int) -> dict[str, Any]:
    """Looking and masking by so many processes."""
    how = across.HowMasked(REGIONS, workers=workers)
    size = sum(len(text.encode(errors="replace")) for value in found for text in texts(value)) / 1e6
    begun = now()
    masker = across.find(found, how, across.Kept())
    looking, middle = since(begun), now()
    for _ in across.mask(found, masker.known, workers):
        pass
    whole = since(begun)
    return {
        "processes": workers,
        "megabytes": round(size, 2),
        "looking": looking,
        "masking": since(middle),
        "megabytes_per_second": round(size / whole["seconds"], 2),
        "megabytes_per_cpu_second": round(size / whole["cpu_seconds"], 2),
        "places": sum(masker.counts.values()),
    }


def by_rule(found: Sequence[Any]) -> dict[str, float]:
    """CPU seconds a megabyte of the rules that cost most."""
    some = [text for value in found[::8] for text in texts(value)]
    size, cost = sum(len(text.encode(errors="replace")) for text in some) / 1e6, {}
    for rule in across.HowMasked(REGIONS).rules():
        begun = time.process_time()
        for text in some:
            if may_match(rule.needs, folded(text)):
                list(rule.find(text))
        cost[rule.name] = round((time.process_time() - begun) / size, 4)
    return dict(sorted(cost.items(), key=lambda item: -item[1])[:COSTLY])


def main(path: Path) -> None:
    """Measure, tell, write."""
    found = values(path)
    rows = [timed(found, workers) for workers in (1, 2)]
    report = {
        **files.origin(),
        "command": f"python scripts/lab/masking_speed.py {path.name}",
        "load_average": round(os.getloadavg()[0], 1),  # above the cores, CPU seconds grow too
        "log": {"sha256": files.sha256(path), "exchanges": len(found)},
        "rows": rows,
        "seconds_per_megabyte": by_rule(found),
    }
    files.write_json(OUT, report)
    print(json.dumps({"rows": rows, "rules": report["seconds_per_megabyte"]}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
