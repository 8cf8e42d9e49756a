"""Tests of replicas are collected where the packages of the service are."""

from __future__ import annotations

from importlib.util import find_spec

from tests.serve.conftest import PACKAGES

collect_ignore_glob = [] if all(find_spec(name) for name in PACKAGES) else ["test_*.py"]
