"""Wait for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 120.0  # a machine may be busy; only a test that fails waits so long


def wait_until(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return once it is so. Raises AssertionError where it is not by then."""
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)
