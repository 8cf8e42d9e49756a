"""Leave out texts that Dynamo makes of each node while it traces for us, and that nobody reads.

For its logs it names the function that each line of code is in, and takes whole files apart for
that; for its records of compilations it prints each symbolic size of each node, of which there are
few that differ.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import SymInt
from torch._dynamo import output_graph, symbolic_convert
from torch._dynamo.output_graph import OutputGraph
from torch._subclasses import FakeTensor
from torch.fx import Graph

from strop.frontend.quick import replaced

Sizes = dict[str, list[int | str]]
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
