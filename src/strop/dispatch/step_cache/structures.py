"""Know where a model can be divided for a step cache, and trace the pieces.

A piece is the model's own forward in a copy of the model in which some parts are of other classes:
these note what they give, give what they are given, or pass on what they get. What nobody reads any
more is no part of the compiled program. So whatever else a forward does, such as adding what a
ControlNet gives, is done in each piece that reads it.

Sources: for UNets, Ma et al., DeepCache: Accelerating Diffusion Models for Free, 2023,
arXiv:2312.00858 (branch 0: what comes before the last layer of the last up block is kept); for
transformers, the First Block Cache of ParaAttention (github.com/chengzeyi/ParaAttention), by the
blocks that diffusers registers for its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from strop.dispatch.signature import Skeleton
from strop.errors import OptionError
from strop.wording import counted

STEP = "strop_step"  # the argument by which a call asks for a piece: its name, then its tensors
FULL, SHALLOW = "full", "shallow"  # of a UNet
HEAD, REST, LAST = "head", "rest", "last"  # of a transformer
_UP_BLOCKS = {"UpBlock2D": "resnets", "CrossAttnUpBlock2D": "attentions"}
_KNOWN = "UNet2DConditionModel, and transformers whose blocks diffusers knows for First Block Cache"


@dataclass
class _Trace:
    """Hold what a piece is given, and what its parts have noted, while it is traced."""

    given: tuple[Any, ...]
    noted: list[Any] = field(default_factory=list)


_now: ContextVar[_Trace] = ContextVar("the piece that is being traced")


class _Noting:
    """This part notes what it gives, and what it was given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        _now.get().noted.append((args, kwargs, result))
        return result


class _Passing:
    """This part of a UNet gives what it gets first."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if kwargs.get("return_dict", True) else (hidden_states,)


class _Giving:
    """This part of a UNet gives what the piece was given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (deep,) = _now.get().given
        return deep if kwargs.get("return_dict", True) else (deep,)


class _Block:
    """This is a block of a transformer. ``known`` says what it takes and gives."""

    known: ClassVar[Any]

    def taken(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the hidden states of picture and text that the block is called with."""
        find, known = self.known._get_parameter_from_args_kwargs, self.known
        text = None
        if known.return_encoder_hidden_states_index is not None:
            text = find(known.encoder_hidden_states_argument_name, args, kwargs)
        return find(known.hidden_states_argument_name, args, kwargs), text

    def made(self, picture: Any, text: Any) -> Any:
        """Return hidden states as the block does."""
        known = self.known
        if known.return_encoder_hidden_states_index is None:
            return picture
        both = [picture, text]
        return tuple(both if known.return_hidden_states_index == 0 else both[::-1])

    def tie(self, given: Tensor, args: Any, kwargs: Any) -> None:
        """Say that what is given has the sizes of what the block would be called with, which are
        known from the sizes of the picture."""
        own, _ = self.taken(args, kwargs)
        for size, other in zip(given.shape, own.shape, strict=True):
            torch._check(size == other)

    def parts(self, result: Any) -> tuple[Any, Any]:
        """Return the hidden states of picture and text that the block has given."""
        known = self.known
        if not isinstance(result, tuple | list):
            return result, None
        text = known.return_encoder_hidden_states_index
        return result[known.return_hidden_states_index], None if text is None else result[text]


class _NotingBlock(_Block):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        _now.get().noted.append((self.taken(args, kwargs), self.parts(result)))
        return result


class _PassingBlock(_Block):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.made(*self.taken(args, kwargs))


class _GivingBlock(_Block):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        picture, text = _now.get().given
        self.tie(picture, args, kwargs)
        return self.made(picture, text)


class _EndingBlock(_Block):
    """This gives what the first block has given, with what the others have added at another
    step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        picture, text, more, more_text = _now.get().given
        self.tie(picture, args, kwargs)
        self.tie(more, args, kwargs)
        return self.made(picture + more, text if more_text is None else text + more_text)


class Structure:
    """Say how a model is divided. It keeps no module."""

    def mark(self, clone: nn.Module, piece: str) -> None:
        """Have parts of a copy of the model be those of a piece."""
        raise NotImplementedError

    def results(self, piece: str, result: Any, trace: Any) -> Any:
        """Return what a piece gives, beside ``result`` of the model's forward."""
        raise NotImplementedError

    def forward_of(self, clone: nn.Module, piece: str) -> Callable[..., Any]:
        """Return what is to be traced of a copy of the model."""
        if not piece:
            forward: Callable[..., Any] = clone.forward
            return forward
        self.mark(clone, piece)

        def traced(*args: Any, **kwargs: Any) -> Any:
            trace = _Trace(tuple(kwargs.pop(STEP)[1:]))
            token = _now.set(trace)
            try:
                return self.results(piece, clone.forward(*args, **kwargs), trace)
            finally:
                _now.reset(token)

        return traced


@dataclass(frozen=True)
class UNetStructure(Structure):
    """The ``kept`` part gives what is kept: (batch, channels, height, width) of the latents. A
    shallow step computes what leads to the first skip connection, and what follows ``kept``. The
    parts that are ``skipped`` give what they get, and those that are ``replaced`` the kept value,
    so that sizes fit; nobody reads either."""

    kept: str
    skipped: tuple[str, ...]
    replaced: tuple[str, ...]

    def mark(self, clone: nn.Module, piece: str) -> None:
        if piece == FULL:
            _put(clone, [self.kept], _Noting)
        else:
            _put(clone, self.skipped, _Passing)
            _put(clone, [*self.replaced, self.kept], _Giving)

    def results(self, piece: str, result: Any, trace: Any) -> Any:
        if piece == SHALLOW:
            return result
        ((_, _, deep),) = trace.noted
        return result, deep[0] if isinstance(deep, tuple) else deep


@dataclass(frozen=True)
class TransformerStructure(Structure):
    """``blocks`` are the paths of all blocks, in the order of their calls."""

    blocks: tuple[str, ...]

    def mark(self, clone: nn.Module, piece: str) -> None:
        first, *others, last = self.blocks
        if piece == HEAD:
            _put_blocks(clone, [first], _NotingBlock)
            _put_blocks(clone, [*others, last], _PassingBlock)
        elif piece == REST:
            _put_blocks(clone, [first], _GivingBlock)
            _put_blocks(clone, [last], _NotingBlock)
        else:
            _put_blocks(clone, [first, *others], _PassingBlock)
            _put_blocks(clone, [last], _EndingBlock)

    def results(self, piece: str, result: Any, trace: Any) -> Any:
        """The head gives hidden states of picture and text, what the first block has added to the
        picture, and how far that is from what it was (one number, or None); the rest its result and
        what the other blocks have added; the last its result."""
        if piece == LAST:
            return result
        (((taken, _), (picture, text)),) = trace.noted
        if piece == REST:
            before, before_text = trace.given
            has_text = text is not None and before_text is not None
            return result, picture - before, text - before_text if has_text else None
        added = picture - taken
        return picture, text, added, _change(added, *trace.given) if trace.given else None


def _change(now: Tensor, then: Tensor) -> Tensor:
    """Return the mean change relative to the mean size, in fp32."""
    return (now.float() - then.float()).abs().mean() / then.float().abs().mean()


def _put(clone: nn.Module, paths: Iterable[str], mixin: type, **more: Any) -> None:
    for path in paths:
        part = clone.get_submodule(path)
        kind = type(part)
        part.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, **more})


def _put_blocks(clone: nn.Module, paths: Iterable[str], mixin: type) -> None:
    for path in paths:
        _put(clone, [path], mixin, known=_known_block(clone.get_submodule(path)))


def _known_block(block: nn.Module) -> Any:
    """Return what diffusers says a block takes and gives, or None."""
    registry: Any = importlib.import_module("diffusers.hooks._helpers").TransformerBlockRegistry
    for kind in type(block).__mro__:
        try:
            return registry.get(kind)
        except ValueError:
            continue
    return None


def piece_of(skeleton: Skeleton) -> str:
    """Return the name of the piece that a call asks for, or nothing for a whole step."""
    given = next((value for name, value in skeleton[2][1:] if name == STEP), None)
    return "" if given is None else str(given[1])


def structure_of(module: nn.Module) -> Structure:
    """Return how a model is divided. Raises OptionError for one of which nobody knows it."""
    if any(kind.__name__ == "UNet2DConditionModel" for kind in type(module).__mro__):
        return _of_unet(module)
    return _of_transformer(module)


def _refused(module: nn.Module, why: str) -> OptionError:
    return OptionError(
        f"numerics='step_cache': a {type(module).__name__} cannot be divided: {why}. Known are"
        f" {_KNOWN}: leave the step cache out"
    )


def _of_unet(unet: Any) -> UNetStructure:
    *others, last = unet.up_blocks
    name, place = type(last).__name__, f"up_blocks.{len(others)}"
    if name not in _UP_BLOCKS:
        raise _refused(unet, f"its last up block is a {name}, not one of {', '.join(_UP_BLOCKS)}")
    count = len(last.resnets)
    if count < 2:
        raise _refused(unet, "its last up block has a single layer")
    unlike = [
        a for a in getattr(last, "attentions", ()) if type(a).__name__ != "Transformer2DModel"
    ]
    if unlike:
        raise _refused(unet, f"its last up block has a {type(unlike[0]).__name__}")
    kept = f"{place}.{_UP_BLOCKS[name]}.{count - 2}"
    layers = [
        f"{place}.{kind}.{n}" for kind in {"resnets", _UP_BLOCKS[name]} for n in range(count - 1)
    ]
    middle = [] if unet.mid_block is None else ["mid_block"]
    skipped = (*middle, *sorted(path for path in layers if path != kept))
    return UNetStructure(kept, skipped, tuple(f"up_blocks.{n}" for n in range(len(others))))


def _of_transformer(module: nn.Module) -> TransformerStructure:
    try:
        common: Any = importlib.import_module("diffusers.hooks._common")
    except ImportError:
        raise _refused(module, "diffusers is not there, or of another edition") from None
    names = common._ALL_TRANSFORMER_BLOCK_IDENTIFIERS
    blocks = {
        f"{name}.{n}": block
        for name, part in module.named_children()
        if name in names and isinstance(part, nn.ModuleList)
        for n, block in enumerate(part)
    }
    unlike = {type(b).__name__ for b in blocks.values() if _known_block(b) is None}
    if unlike:
        raise _refused(module, f"diffusers does not say what {', '.join(sorted(unlike))} give")
    if len(blocks) < 2:
        found = counted(len(blocks), "block")
        raise _refused(module, f"it has {found} in lists that diffusers knows, of at least 2")
    return TransformerStructure(tuple(blocks))
