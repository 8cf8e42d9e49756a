"""Say over which devices the rows of a call are spread: ``optimize(pipe, parallel=...)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strop.errors import OptionError
from strop.wording import counted

MODES = ("cfg", "batch")
CONTEXT = "context"  # divides tokens among processes (``context.py``)


@dataclass(frozen=True, slots=True)
class Parallel:
    """``mode`` is "cfg", which runs the two halves of a call on two devices, or "batch", which cuts
    a call evenly for all ``devices``. The first of these is where the model lies."""

    mode: str
    devices: tuple[torch.device, ...]

    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """Return how many rows each device gets, the first ones one more where they are not even;
        those that would get none are left out. Rows are never reordered."""
        count = min(len(self.devices), num_rows)
        least, more = divmod(num_rows, count)
        return tuple(least + (place < more) for place in range(count))

    def refusal(self, num_rows: int) -> str:
        """Say why a call with so many rows runs on the first device alone, or nothing."""
        if num_rows < 2:
            return (
                "the call has one row, of which there is nothing to split. A pipeline without"
                " guidance makes such calls, and one that calls its model twice a step"
            )
        if self.mode == "cfg" and num_rows % 2:
            return (
                f"{counted(num_rows, 'row')} are not two halves: parallel='batch' splits those too"
            )
        return ""

    def __str__(self) -> str:
        return f"parallel={self.mode!r} on {', '.join(map(str, self.devices))}"


def parallel_of(
    mode: object, devices: Sequence[str | torch.device] | None, home: torch.device
) -> Parallel:
    """Return the settings for a model that lies on ``home``. Without ``devices``, "cfg" takes the
    next GPU beside that one, and "batch" all that the process sees.

    Raises OptionError for another mode, and for devices that are not there or not enough.
    """
    if mode not in MODES:
        known = " or ".join(map(repr, (*MODES, CONTEXT)))
        raise OptionError(f"parallel={mode!r}: expected {known}, or None for one device")
    assert isinstance(mode, str)
    if devices is None:
        return Parallel(mode, _default_devices(mode, home))
    if isinstance(devices, str | torch.device):
        raise OptionError(f"devices={devices!r}: expected a list, such as ['cuda:0', 'cuda:1']")
    found = tuple(map(_checked, devices))
    if len(found) < 2 or (mode == "cfg" and len(found) != 2):
        wanted = "two devices" if mode == "cfg" else "two devices or more"
        raise OptionError(f"parallel={mode!r} takes {wanted}; devices={list(devices)!r}")
    twice = [device for device in found if device.type != "cpu" and found.count(device) > 1]
    if twice or len({device.type for device in found}) > 1:
        raise OptionError(f"devices={list(devices)!r}: expected different ones of one type")
    if found[0] != home:
        raise OptionError(
            f"devices={list(devices)!r}: the model lies on {home}, which has to be the first one"
        )
    return Parallel(mode, found)


def _default_devices(mode: str, home: torch.device) -> tuple[torch.device, ...]:
    count = torch.cuda.device_count()
    if home.type != "cuda":
        raise OptionError(
            f"parallel={mode!r} needs two GPUs, and the model lies on {home}: move it first"
            f" (pipe.to('cuda')), or name devices. This process sees {_seen(count)}"
        )
    if count < 2:
        raise OptionError(
            f"parallel={mode!r} needs two GPUs, and this process sees {_seen(count)}: see"
            " nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    first = home.index or 0
    others = [torch.device("cuda", (first + step) % count) for step in range(1, count)]
    return (torch.device("cuda", first), *(others[:1] if mode == "cfg" else others))


def _seen(count: int) -> str:
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return f"{counted(count, 'GPU')} ({', '.join(names)})" if names else "no GPU"


def _checked(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"devices: {given!r} is no device: {error}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise OptionError(f"devices: {given!r} is neither a CPU nor an NVIDIA GPU")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise OptionError(f"devices: there is no {given!r}: this process sees {_seen(count)}")
    return torch.device("cuda", index)
