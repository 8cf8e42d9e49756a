"""Note which module each node of a trace comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def settle_origins(gm: GraphModule, module: nn.Module, origins: dict[str, str]) -> None:
    """Give what was traced behind the last part of ``module`` to the module itself."""
    for node in gm.graph.nodes:
        origins.setdefault(node.name, type(module).__name__)


@contextmanager
def record_origins(
    module: nn.Module, origins: dict[str, str], entered: Callable[[nn.Module], object]
) -> Iterator[None]:
    """Note for each traced node the innermost module that was running."""
    paths = {id(m): name or type(module).__name__ for name, m in module.named_modules()}
    stack: list[str] = [type(module).__name__]

    def settle() -> None:
        proxy = get_proxy_mode()
        assert proxy is not None
        for node in reversed(proxy.tracer.graph.nodes):
            if node.name in origins:
                return
            origins[node.name] = stack[-1]

    def enter(m: nn.Module, args: Any) -> None:
        if get_proxy_mode() is None:
            return  # another thread's module
        settle()
        entered(m)
        stack.append(paths.get(id(m), stack[-1]))
        origins["<current>"] = stack[-1]

    def leave(m: nn.Module, args: Any, output: Any) -> None:
        if get_proxy_mode() is not None:
            settle()
            stack.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
