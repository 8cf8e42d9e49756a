"""Leave out what Dynamo does while it traces for us and that changes nothing, or that nobody reads.

For its logs it names the function that each line of code is in, and takes whole files apart for
that; for its records of compilations it prints each symbolic size of each node, of which there are
few that differ; and it makes expressions of the sizes of weights, which are numbers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import SymInt
from torch._dynamo import output_graph, symbolic_convert
from torch._dynamo.output_graph import OutputGraph
from torch._subclasses import FakeTensor
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from strop.frontend.quick import replaced

Sizes = dict[str, list[int | str]]
_MAKE_SIZES = "_create_symbolic_sizes_strides_storage_offset"
_FIXED_STRIDES = {DimDynamic.STATIC, DimDynamic.INFER_STRIDE}
_READERS = (  # Dynamo's logs that name functions
    output_graph.trace_call_log,
    symbolic_convert.trace_call_log,
    symbolic_convert.trace_source_log,
)


@contextmanager
def without_function_names() -> Iterator[None]:
    """Name no functions for Dynamo's logs within the body, unless somebody listens to them."""
    if any(reader.isEnabledFor(logging.DEBUG) for reader in _READERS):
        yield
        return

    def unnamed(usual: Callable[[str, int], str | None]) -> Callable[[str, int], str | None]:
        return lambda filename, line: None

    with replaced(symbolic_convert, "get_funcname", unnamed):
        yield


@contextmanager
def fixed_sizes_as_they_are() -> Iterator[None]:
    """Take the sizes of a tensor for numbers where all of them are fixed, within the body."""

    def quick(usual: Callable[..., Any]) -> Callable[..., Any]:
        def make(
            env: ShapeEnv,
            sizes: Sequence[Any],
            strides: Sequence[Any],
            offset: Any,
            *given: Any,
            symbolic_context: Any = None,
            **named: Any,
        ) -> Any:
            if _is_fixed(symbolic_context) and not env.should_record_events:
                numbers = tuple(sizes), tuple(strides), offset
                if all(type(number) is int for number in (*sizes, *strides, offset)):
                    return numbers
            named["symbolic_context"] = symbolic_context
            return usual(env, sizes, strides, offset, *given, **named)

        return make

    with replaced(ShapeEnv, _MAKE_SIZES, quick):
        yield


def _is_fixed(context: Any) -> bool:
    """Tell whether a tensor is to have the sizes and strides that it has, with no condition."""
    if context is None:
        return False
    is_free = not any((*context.constraint_sizes, *context.constraint_strides))
    are_fixed = all(dim is DimDynamic.STATIC for dim in context.dynamic_sizes)
    return is_free and are_fixed and _FIXED_STRIDES.issuperset(context.dynamic_strides)


def print_each_size_once(output: OutputGraph) -> None:
    """Have Dynamo print equal sizes of this graph once for the record that it keeps of them."""
    vars(output)["get_graph_sizes_structured"] = functools.partial(_sizes, output.graph)


def _sizes(graph: Graph) -> Sizes:
    """Return the sizes of all nodes as ``OutputGraph.get_graph_sizes_structured`` does."""
    texts: dict[object, str] = {}

    def text(size: SymInt) -> str:
        known = size.node.expr
        if known not in texts:
            texts[known] = repr(size)
        return texts[known]

    found: Sizes = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, FakeTensor):
            found[node.name] = [s if isinstance(s, int) else text(s) for s in value.shape]
    return found
