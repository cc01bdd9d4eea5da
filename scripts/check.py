"""Say whether a running server drafts and answers as the export was measured to.

    outrider check url=http://127.0.0.1:8080 expected=exports/eagle3

Asks it the prompts of expected.json and compares answers, drafted and accepted tokens. A
server in 16 bits may part where the target's two best logits lie near each other: such
answers are compared up to there, and are no fault unless they are more than 16 bits explain.
Exit code 1: it does not, with the place where it differs. scripts/exporting/contract.py says
what the file holds.
"""

from __future__ import annotations

from pathlib import Path

from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.exporting import contract, contract_check
from outrider.scripts.exporting.config import CheckConfig
from outrider.scripts.scoring.servers import Endpoint


@entry("check", CheckConfig)
def main(cfg: CheckConfig) -> int:
    """Ask, compare, say."""
    wanted = contract.load(Path(cfg.expected).expanduser())
    server = Endpoint(cfg.url, cfg.timeout, cfg.retries, cfg.key_env)
    found = contract_check.checked(wanted, server)
    if cfg.out:
        files.write_json(Path(cfg.out), found | {"url": cfg.url, "command": files.command()})
    for line in contract_check.summary(found):
        print(line)
    return 0 if found["served"] else 1


if __name__ == "__main__":
    main()
