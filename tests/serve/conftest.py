"""Tests of the service are collected where its packages are: a machine with a GPU may lack them."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "httpx2")

collect_ignore_glob = [] if all(find_spec(name) for name in PACKAGES) else ["test_*.py"]
