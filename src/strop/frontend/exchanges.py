"""Know what processes exchange inside of a forward: torch's functional collectives.

A call and the wait for it are one operator here, ``strop::exchange``, whose operand and result are
flat. Each process of a group has to make the same exchanges in the same order, whatever else it
does, or all of them wait for ever: an exchange takes the one before it as an operand that nobody
reads, so that no pass and no runtime can put it elsewhere, and each is a node of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from strop.errors import CaptureError
from strop.frontend.differentiated import define
from strop.frontend.equal_pieces import call_chunk
from strop.frontend.quick import replaced
from strop.ir.exchange import ALL_GATHER, ALL_TO_ALL, exchanged
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

_TOGETHER = "_maybe_view_chunk_cat"
_library = torch.library.Library("strop", "FRAGMENT")
_library.define("exchange(Tensor x, str how, str group, int size) -> Tensor")


def _shape(x: Tensor, how: str, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] * (size if how == ALL_GATHER else 1),))


define(_library, "exchange", exchanged, _shape)
EXCHANGE = torch.ops.strop.exchange.default


def _all_to_all(x: Tensor, outs: Sequence[int], ins: Sequence[int], group: Any) -> Tensor:
    """Each process sends piece i of its first dim to process i: pieces are of one size here."""
    name, size = _named(group), len(ins)
    if not all(piece == ins[0] for piece in (*outs, *ins)) or ins[0] * size != x.shape[0]:
        raise CaptureError("processes exchange pieces of different sizes (all_to_all_single)")
    found: Tensor = EXCHANGE(x.reshape(-1), ALL_TO_ALL, name, size)
    return found.reshape(x.shape)


def _all_gather(x: Tensor, size: int, group: Any) -> Tensor:
    found: Tensor = EXCHANGE(x.reshape(-1), ALL_GATHER, _named(group), size)
    return found.reshape(x.shape[0] * size, *x.shape[1:])


def _named(group: Any) -> str:
    return group if isinstance(group, str) else str(group.group_name)


def _waited(x: Tensor) -> Tensor:
    """An exchange has ended when it returns."""
    return x


@contextmanager
def traced_collectives() -> Iterator[None]:
    """Have torch put what it has gathered together, meanwhile, without questions about memory,
    which it asks to see whether sizes depend on data (2.11 does not), and have ``all_gather`` into
    a list of tensors be an exchange: diffusers gathers masks by it."""
    if not torch.distributed.is_available():
        yield
        return
    with (
        replaced(_calls(), _TOGETHER, _put_together),
        replaced(torch.distributed, "all_gather", _into_list),
    ):
        yield


def _into_list(own: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if get_proxy_mode() is None:  # another thread's
            return own(tensor_list, tensor, group, async_op)
        if async_op or any(place.shape != tensor.shape for place in tensor_list):
            raise CaptureError("it gathers tensors of several sizes, or does not wait for them")
        name, size = _named(group or torch.distributed.group.WORLD), len(tensor_list)
        gathered = EXCHANGE(tensor.reshape(-1), ALL_GATHER, name, size)
        for place, piece in zip(tensor_list, call_chunk(gathered, size), strict=True):
            place.copy_(piece.reshape(place.shape))
        return None

    return all_gather


def _put_together(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def put_together(gathered: Tensor, size: int, dim: int) -> Tensor:
        if get_proxy_mode() is None:  # another thread's
            return own(gathered, size, dim)
        return torch.cat(call_chunk(gathered, size, 0), dim)

    return put_together


def _calls() -> Any:
    return importlib.import_module("torch.distributed._functional_collectives")


def functional_collectives() -> dict[Any, Callable[..., Any]]:
    """Return torch's operators, each with what stands for it in a trace; none where this torch
    cannot do them."""
    if not torch.distributed.is_available():
        return {}
    _calls()  # defines them
    own = torch.ops._c10d_functional
    return {
        own.all_to_all_single.default: _all_to_all,
        own.all_gather_into_tensor.default: _all_gather,
        own.wait_tensor.default: _waited,
    }


def _exchange(importer: Importer, fx: FxNode, x: FxNode, how: str, group: str, size: int) -> Node:
    last = importer.last_exchange
    inputs = [importer.node(x), *([last] if last is not None else [])]
    number = 0 if last is None else last.attrs["number"] + 1
    importer.last_exchange = made = importer.builder.make(
        "exchange",
        inputs,
        importer.shape(fx),
        fx.meta["val"].dtype,
        how=how,
        group=group,
        size=size,
        number=number,
    )
    return made


EXCHANGES: dict[Any, Callable[..., Node]] = {EXCHANGE: _exchange}


def refuse_unread(gm: torch.fx.GraphModule) -> None:
    """Raise CaptureError where nothing reads what an exchange gives: it would be left out, and the
    process at the other end, if it runs in eager, would wait for it."""
    read = {n for node in gm.graph.nodes for n in node.all_input_nodes}
    for node in gm.graph.find_nodes(op="call_function", target=EXCHANGE):
        if node not in read:
            raise CaptureError("it exchanges a tensor with other processes that it does not read")
