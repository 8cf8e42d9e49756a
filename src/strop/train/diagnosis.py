"""Find which operation a CUDA graph cannot hold, and which line asked for it."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_BACKWARD = "_engine_run_backward"  # torch's way into the pass; on a GPU another thread's
_SYNCHRONISES = "synchronizing CUDA operation"  # torch's words
# operators whose result, or whose size, the host reads
_READS = {
    "aten::_local_scalar_dense": ".item(), float(), int(), bool() or if read a tensor",
    "aten::equal": "torch.equal reads a tensor",
    "aten::nonzero": "the number of elements that are not zero is a size",
    "aten::masked_select": "the number of elements that are chosen is a size",
    "aten::_unique2": "the number of unique elements is a size",
    "aten::unique_dim": "the number of unique elements is a size",
    "aten::unique_consecutive": "the number of unique elements is a size",
    "aten::bincount": "the largest element is a size",
    "aten::repeat_interleave": "the sum of the repeats is a size",
}
_COPIES = ("aten::_to_copy", "aten::copy_")


class WaitFinder(TorchDispatchMode):
    """Notes what waits for the device. A GPU says so itself; operators that always do are known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = _why(func, args, kwargs)
        if not why and torch.cuda.is_initialized():
            try:
                with _waiting_is_an_error():
                    return func(*args, **kwargs)
            except RuntimeError as error:
                if _SYNCHRONISES not in str(error):
                    self._note(func, str(error).partition("\n")[0])
                    raise
                why = "it waits for the device"
        if why:
            self._note(func, why)
        return func(*args, **kwargs)

    def _note(self, func: Any, why: str) -> None:
        text = f"{func} {_asked_by(sys._getframe(2))}: {why}"
        if text not in self.found:
            self.found.append(text)


def culprits(step: Callable[[], Any]) -> list[str]:
    """Run a step once more, plainly, and name each operation in it that waits for the device."""
    watch = WaitFinder()
    try:
        with watch:
            step()
    except (RuntimeError, ValueError, TypeError) as error:
        watch.found.append(f"run again outside of the graph it ends with {first_line(error)}")
    return watch.found


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's, or of a library, on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or list(frames)
    if not own:
        return "an unknown place"
    last = own[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _why(func: Any, args: Any, kwargs: Any) -> str:
    name = func._schema.name
    if name in _COPIES and _crosses(name, args, kwargs):
        return "a copy between the CPU and the GPU; make the tensor on the GPU, before the step"
    if name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        return "the number of elements that a mask chooses is a size; use torch.where"
    return _READS.get(name, "")


def _crosses(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether a copy goes from ordinary memory of the host to a device, or back."""
    if name == "aten::copy_":
        source, target = args[1].device.type, args[0].device.type
        waits = not (len(args) > 2 and args[2])
    else:
        source = args[0].device.type
        target = torch.device(kwargs.get("device") or source).type
        waits = not kwargs.get("non_blocking")
    return bool(source != target and waits and "cpu" in (source, target))


def _asked_by(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = None if frame.f_code.co_name == _BACKWARD else frame.f_back
    if frame is None:
        return "in the backward pass"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}: {line}"


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
