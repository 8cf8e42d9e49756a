"""Leave out what torch does while it traces and nobody here reads. Of a training step of the SD1.5
UNet it is a third of the time."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._logging._internal import trace_log
from torch.fx.experimental import proxy_tensor, symbolic_shapes

_META = "_extract_tensor_metadata"
_PRINTED = {
    "_log_joint_graph": None,
    "_log_fw_bw_graphs": (None, None),
}  # and what they then return


@contextmanager
def quick() -> Iterator[None]:
    """Spare AOTAutograd work that nobody reads while it traces and cuts a joint graph."""
    from torch._functorch._aot_autograd import graph_compile  # loads Inductor: for Dynamo alone

    with ExitStack() as stack:
        stack.enter_context(without_tensor_meta())
        for name, result in _PRINTED.items():
            stack.enter_context(replaced(graph_compile, name, _muted(graph_compile, result)))
        yield


@contextmanager
def without_tensor_meta() -> Iterator[None]:
    """Leave out ``tensor_meta`` of traced values, which nobody here reads and which asks for every
    memory format of symbolic sizes: ``val`` says everything. Other threads keep it."""

    def nothing(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        return None

    with replaced_here(proxy_tensor, _META, nothing):
        yield


# Where torch's own code for tracing is, of which a guard's place in the code says nothing.
_OF_TRACING = (
    "torch",
    "torch._compile",
    "torch._dynamo.eval_frame",
    "torch._dynamo.external_utils",
    "torch._inductor.sizevars",
    "torch._library.custom_ops",
    "torch._library.fake_impl",
    "torch._logging._internal",
    "torch._logging.structured",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.meta_utils",
    "torch.export._trace",
    "torch.fx._symbolic_trace",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.interpreter",
)


@contextmanager
def without_loading_compilers() -> Iterator[None]:
    """Name the files of torch's tracers without loading Inductor and torch.export, which takes up
    to a second: what is not loaded has no place in a traceback."""

    def replacement(usual: Callable[[], set[str]]) -> Callable[[], set[str]]:
        @functools.cache
        def files() -> set[str]:
            loaded = (sys.modules.get(name) for name in _OF_TRACING)
            found = {m.__file__ for m in loaded if m is not None and m.__file__}
            return {*found, *_higher_order_files(), "<string>"}

        return files

    with replaced(symbolic_shapes, "uninteresting_files", replacement):
        yield


def _higher_order_files() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._higher_order_ops") and getattr(module, "__file__", None):
            yield str(module.__file__)


def _muted(graph_compile: Any, result: Any) -> Callable[[Any], Any]:
    """Print graphs in full only if somebody listens; torch does so whether or not somebody does."""

    def replacement(usual: Callable[..., Any]) -> Callable[..., Any]:
        def log(*args: Any, **kwargs: Any) -> Any:
            loggers = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
            if trace_log.handlers or any(each.isEnabledFor(logging.INFO) for each in loggers):
                return usual(*args, **kwargs)
            return result

        return log

    return replacement


@contextmanager
def replaced_here(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Call ``instead``, with a module's or class's own ``name`` before the arguments, in its place
    within the body. Other threads keep it."""
    thread = threading.get_ident()

    def replacement(usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return usual(*args, **kwargs)
            return instead(usual, *args, **kwargs)

        return call

    with replaced(owner, name, replacement):
        yield


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Put what ``replacement`` makes of a module's or class's own ``name`` in its place within the
    body."""
    usual = vars(owner).get(name)
    if usual is not None:  # another torch may have no such function
        setattr(owner, name, replacement(usual))
    try:
        yield
    finally:
        if usual is not None:
            setattr(owner, name, usual)
