"""Runs inside vLLM's own environment (no import of this repository): one server on loopback,
until its standard input is closed.

    .venv-engines/bin/python scripts/lab/serving/run_vllm_server.py SETTINGS.json

Settings: model (folder), speculative (a speculative_config or null), slots, context, threads,
exact (float32 and eager, else bfloat16, compiled where it can be).
Prints one JSON line {"url", "version"} when it answers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(path: str) -> int:
    """Start, tell the address, wait for the end of standard input, stop."""
    with open(path) as file:
        job: dict[str, Any] = json.load(file)
    port = free_port()
    env = {**QUIET, **os.environ, "OMP_NUM_THREADS": str(job["threads"])}
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options(job, port)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        if not ready(server, url):
            return server.poll() or 0
        version = importlib.metadata.version("vllm-cpu")
        print(json.dumps({"url": url, "version": version}), flush=True)
        sys.stdin.read()
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
    return 0


def options(job: dict[str, Any], port: int) -> list[str]:
    """The command line behind the server's name."""
    said = [
        f"--model={job['model']}",
        "--host=127.0.0.1",
        f"--port={port}",
        *(["--dtype=float32", "--enforce-eager"] if job["exact"] else ["--dtype=bfloat16"]),
        f"--max-model-len={job['context']}",
        f"--max-num-seqs={job['slots']}",
        "--no-enable-prefix-caching",
        "--no-async-scheduling",
        "--disable-uvicorn-access-log",
        "--generation-config=vllm",  # nothing of the model's own sampling defaults
    ]
    if job["speculative"]:
        said.append(f"--speculative-config={json.dumps(job['speculative'])}")
    return said


def ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until it answers; False when it ended, or when nobody waits any more."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
        if select.select([sys.stdin], [], [], 0)[0]:
            return False
    return False


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
