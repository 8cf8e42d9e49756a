"""``benchmarks/context_parallel.py`` measures a tiny transformer in two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_two_processes_share_a_step(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    script = [str(ROOT / "benchmarks/context_parallel.py"), "--out", str(out)]
    done = subprocess.run(
        [*launch, *script, "--tiny", "--samples", "2", "--inner", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["row"]["name"] == "D1x2-context"
    assert found["processes"] == 2
    assert [*found["contenders"]] == ["eager-one", "eager-context", "strop-one", "strop-context"]
    assert all("failed" not in each for each in found["contenders"].values())
    assert found["contenders"]["strop-one"]["sent_bytes"] == 0
    assert found["contenders"]["strop-context"]["sent_bytes"] > 0
    assert found["ratio"].keys() == {"eager", "strop"}
