"""Say what a GPU's memory held at the moment when it held the most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def largest_at_peak(trace: Iterable[Mapping[str, Any]], count: int = 12) -> list[str]:
    """Return a line for each of the largest pieces, from what torch's allocator has recorded. What
    was freed stays while a stream may still read it, and is marked."""
    live: dict[int, Mapping[str, Any]] = {}
    waiting: set[int] = set()
    now = most = 0
    lines: list[str] = []
    for event in trace:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            live[address] = event
            now += size
        elif event["action"] == "free_requested":
            waiting.add(address)
        elif event["action"] == "free_completed":
            waiting.discard(address)
            now -= size if live.pop(address, None) else 0
        if now > most:
            most = now
            largest = sorted(live.values(), key=lambda e: -e["size"])[:count]
            lines = [_line(each, each["addr"] in waiting) for each in largest]
    return [f"{most / 1e6:.1f} MB in all", *lines]


def _line(event: Mapping[str, Any], is_waiting: bool) -> str:
    frames = [f"{f['filename']}:{f['line']}" for f in event.get("frames", ())]
    own = [f for f in frames if "/strop/" in f] or frames
    mark = " (freed, and waits for a stream)" if is_waiting else ""
    return f"{event['size'] / 1e6:.1f} MB{mark} {' < '.join(own[:3])}"


def recorded(call: Callable[[], None], device: torch.device) -> list[str]:
    """Run a call, and return what was the largest at its peak."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    try:
        call()
        torch.cuda.synchronize(device)
        snapshot: Any = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return largest_at_peak(snapshot["device_traces"][device.index])
