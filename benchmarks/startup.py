"""What a user waits for before anything happens: the import, the help, a plan.

    python benchmarks/startup.py

Each figure is the median over fresh processes; the plan is that of GPT-2 small from its Hugging Face
configuration on eight H100, cold (no kept profile) and warm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
ROUNDS = 5


def _seconds(*command: str, rounds: int = ROUNDS, env: dict[str, str] | None = None) -> float:
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, *command], check=True, capture_output=True, env={**os.environ, **(env or {})}
        )
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def main() -> int:
    torch = _seconds("-c", "import torch")
    both = _seconds("-c", "import torch, apportion")
    print(f"import torch                     {torch:6.2f} s")
    print(f"import apportion beyond it       {both - torch:6.2f} s")
    print(f"apportion --help                 {_seconds('-m', 'apportion', '--help'):6.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(GPT2))
        plan = (
            "-m",
            "apportion",
            "plan",
            f"hf:{config}",
            "--devices",
            "8xH100",
            "--batch-size",
            "64",
            "--json",
        )
        cold = _seconds(*plan, env={"APPORTION_CACHE": "off"})
        kept = {"APPORTION_CACHE": str(Path(folder) / "cache")}
        _seconds(*plan, rounds=1, env=kept)
        print(f"plan of GPT-2 small, cold        {cold:6.2f} s")
        print(f"plan of GPT-2 small, warm        {_seconds(*plan, env=kept):6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
