"""Weights are data: a program reads Parameters where they are, and notices when they move.

A check compares every Parameter's identity and pointer, the modules that own them, the adapters on
them, and what else the code reads (``global_guards``). It takes the host some 0.3 ms for a UNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strop.dispatch.adapted_weights import AdaptedWeights
from strop.dispatch.coded_weights import CodedWeights
from strop.dispatch.features import replaced_part
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.global_guards import GlobalGuards
from strop.dispatch.hooks import is_untraced
from strop.dispatch.identities import identities
from strop.dispatch.parts_offload import parts_offload
from strop.dispatch.placed_weights import PlacedPieces, pieces_of
from strop.dispatch.quick_look import QuickLook
from strop.dispatch.scales import is_scale
from strop.dispatch.tied_memory import tied
from strop.dispatch.told_apart import ToldApart, attribute_asked_for
from strop.dispatch.training_mode import sensitive_parts
from strop.dispatch.varying_settings import TurnedSettings
from strop.frontend import (
    computed_weights,
    int8_layers,
    layerwise_casting,
    moving_hooks,
    sharded_context,
)
from strop.frontend.adapted_layers import ACTS, LEFT_OVER, is_left_over
from strop.frontend.clones import clone_structure
from strop.frontend.composed_tensors import (
    Place,
    PlainLook,
    composed_in,
    is_composed,
    make_up,
    watched_places,
)
from strop.frontend.module_parts import graph_text, is_exported, named_parts, own_attributes
from strop.frontend.module_tensors import plain_places, tensor_places, with_sizes
from strop.frontend.stable_text import is_plain
from strop.frontend.tables import table_names
from strop.ir.program import Program
from strop.options import Options
from strop.runtime.derived.packed_weights import PackedWeights
from strop.runtime.derived.sources import KnownMemory

_DATA_PTR, _SIZE = Tensor.data_ptr, Tensor.size
_DEFAULTS = Options()
_TRAINING = itemgetter("training")
MOVED = (
    "offloading takes weights of parts to another device and back in each call, for which nothing"
    " stands here: move the model to its device instead"
)
IN_8_BITS = (
    "keeps codes of all weights on the device, and offloading by layers or groups streams them:"
    " leave one of the two out, or move whole models (enable_model_cpu_offload)"
)


class ModuleState:
    """This watches the Parameters, buffers and tensor attributes of one module."""

    def __init__(
        self,
        module: nn.Module,
        options: Options = _DEFAULTS,
        *,
        folds_adapters: bool = True,
        streams: bool = False,
    ) -> None:
        """Take layers with adapters for plain ones if ``folds_adapters``: their factors get no
        gradients then. ``options`` say how. ``streams``: somebody can stand for hooks that take
        weights of parts to a device and back."""
        self._streams = streams
        self.module, self._folds_adapters, self._options = module, folds_adapters, options
        self.effective = AdaptedWeights(options)
        self._ignored: frozenset[str] = frozenset()  # caches that the module itself writes
        self.merged, self.padded = PlacedPieces(), PlacedPieces()
        self.packed, self.coded = PackedWeights(), CodedWeights()
        self.place: torch.device | None = None  # where weights are to lie when a plan of them runs
        self._looks: dict[int, PlainLook] = {}  # at the memory of tensors, by their ids
        self._kept: dict[int, Any] = {}  # objects that a structure names by their ids
        self.turned = TurnedSettings(module)
        self.num_scans = 0
        self.scan()

    def have_called(self, before_write: Callable[[], object]) -> None:
        """Have this called before anything is written that runs may still read."""
        self.effective.have_called(before_write)
        self.coded.before_write = before_write

    @collection_paused()
    def scan(self) -> None:
        """Look at the module anew."""
        self.num_scans += 1
        everything = named_parts(self.module)
        self.modules = [part for _, part in everything]
        refused = self._scan_offload(everything)
        if self._folds_adapters:
            self.effective.scan(self.module, self.modules)
        stand_ins = self.effective.stand_ins
        self.parts = named_parts(self.module, stand_ins) if stand_ins else everything
        self.turned.scan(self.parts)
        turned = {id(part) for path, part in self.parts if (path, "p") in self.turned.names}
        self.train_sensitive = sensitive_parts(self.modules, turned)
        self.shards, self.exchanges_with, undivided = sharded_context.found_in(
            self.module, everything[1:]
        )
        # why a part with another forward is in the way
        self.replaced = replaced_part(everything) or refused or undivided
        self.casts = layerwise_casting.casts_in(everything[1:])
        self.computed = computed_weights.computed_in(everything[1:])
        held = list(tensor_places(self.parts, self.effective.tables))
        self._scan_modules(held)
        places, self.lazy = with_sizes(plain_places(held, self._looks))
        used = {id(table) for _, table, _ in places}
        self._looks = {number: t for number, t in self._looks.items() if id(t) in used}
        self.names = [name for name, _, _ in places]
        self._adapted: list[tuple[str, Any]] = [
            (path, part) for path, part in self.parts if "lora_A" in part._modules
        ]
        self._weights = identities((table, key) for _, table, key in places)
        self.tensors: list[Tensor] = self._weights.values
        self.tied = tied(self.tensors)
        self._scan_tables()
        self._owned = [table for m in self.modules for table in _tables_of(m)]
        self._owned += moving_hooks.registered(self.modules)
        # optimize is about to set ``forward``
        self._num_owned = self._count_owned() + ("forward" not in self.module.__dict__)
        self.adapters = self._adapter_state()
        self.effects: set[str] = set()  # what calls in eager have changed since
        self.global_guards = self._global_guards()
        if self.effective and not ACTS.isdisjoint(self.global_guards.own_names):
            self._folds_adapters, self.effective = False, AdaptedWeights(self._options)
            self.scan()  # a user's code looks for the adapters while it runs
            return
        self.structure = self._structure()
        self._scan_questions()
        self._memory = KnownMemory(self.tensors)
        for pieces in (self.merged, self.padded):
            pieces.keep_at({*self.pointers})

    def _scan_tables(self) -> None:
        """Look at tables of embeddings, whose numbers of rows are data."""
        tables = {*table_names(self.parts)}
        self.tables = [name for name in self.names if name in tables]
        self._tables = [t for t, n in zip(self.tensors, self.names, strict=True) if n in tables]
        self.rows = rows_of(self._tables)

    def _scan_questions(self) -> None:
        """Look at what the code asks about tensors. Attributes of weights count where it asks."""
        names = self.global_guards.own_names
        self.told_apart = ToldApart.by(names, self.global_guards.asks_same, self.tensors)
        named = zip(self.names, self.tensors, strict=True)
        self.attribute_asked_for = attribute_asked_for(names, named)
        if self.told_apart.attributes:
            held = [vars(tensor) for tensor in self.tensors]
            self._owned += held
            self._num_owned += sum(map(len, held))

    def _scan_offload(self, everything: Sequence[tuple[str, nn.Module]]) -> str:
        """Look for hooks that take weights of parts to a device and back, and say why nobody can
        stand for them, or nothing."""
        self.offload, reason = parts_offload(self.module, everything)
        if self.offload is not None and not self._streams:
            self.offload, reason = None, MOVED
        elif self.offload is not None and (own := self._options.eight_bit):
            self.offload, reason = None, f"numerics={own!r} {IN_8_BITS}"
        self.effective.stay_beside(is_wanted=self.offload is not None)
        return reason

    def _count_owned(self) -> int:
        """Count the attributes of all modules, but for what diffusers leaves when it has fused."""
        left = LEFT_OVER if hasattr(type(self.module), "fuse_lora") else ()
        num_left = sum(name in self.module.__dict__ for name in left)
        return sum(map(len, self._owned)) - num_left

    def _scan_modules(self, held: Sequence[Place]) -> None:
        """Look at hooks, and at what each module holds by name, these tensors among it."""
        edges: list[tuple[Mapping[str, Any], str]] = []
        self.hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        for owner in self.modules:
            edges += [(owner._modules, k) for k in owner._modules]
            if owner is not self.module:
                self.hooks += [owner._forward_pre_hooks, owner._forward_hooks]
                self.backward_hooks += [owner._backward_pre_hooks, owner._backward_hooks]
            named = ("processor",) if owner is self.module else ("processor", "forward")
            edges += [(owner.__dict__, k) for k in named if k in owner.__dict__]
            edges += layerwise_casting.watched_hooks(owner)
            edges += moving_hooks.watched_hooks(owner)
            edges += computed_weights.watched_hooks(owner)
            edges += sharded_context.watched_hooks(owner)
            if isinstance(owner, GraphModule):  # its recompile() gives its class another one
                edges.append((vars(type(owner)), "forward"))
        edges += self._empty_places(held)
        edges += self._scan_composed(held)
        self._edges = identities(edges)

    def _empty_places(self, held: Sequence[Place]) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield names that stand for None, or for a tensor that has another name, too: a module may
        get a tensor there. Hooks of an offload put others into the latter."""
        places = {(id(table), key) for _, table, key in held}
        twice = {id(table[key]) for _, table, key in held} if self.offload is None else set[int]()
        for owner in self.modules:
            for table in (owner._parameters, owner._buffers):
                for key, value in table.items():
                    is_tied = id(value) in twice and (id(table), key) not in places
                    if value is None or is_tied:
                        yield table, key

    def _scan_composed(self, held: Sequence[Place]) -> list[tuple[Mapping[str, Any], str]]:
        """Note what weights of libraries' own classes are made of, and return where they are held
        and what they hold beside tensors."""
        places: list[tuple[Any, str]] = []
        composed: list[tuple[str, Tensor]] = []
        for name, table, key in held:
            if is_composed(table[key]):
                composed.append((name, table[key]))
                places += [(table, key), *watched_places(table[key])]
        quantised = [(path, part) for path, part in self.parts if int8_layers.is_int8(part)]
        for _, layer in quantised:
            int8_layers.share_codes(layer)
            places += int8_layers.watched_places(layer)
        self.make_ups = (
            *((name, make_up(tensor)) for name, tensor in composed),
            *((f"{path}.weight", int8_layers.make_up(layer)) for path, layer in quantised),
        )
        self.composed_kinds = {type(part) for _, t in composed for part in composed_in(t)}
        return places

    def bound_to(self) -> tuple[Any, ...]:
        """Return what tells bound programs apart, but for arguments: the graph by its structure,
        and every tensor by its identity, its address, its sizes and its steps in memory."""
        places = [(tensor.shape, tensor.stride()) for tensor in self.tensors]
        numbers = list(map(id, self.tensors))
        return self.structure, self.replaced, numbers, self.pointers, places

    @property
    def watched(self) -> list[Place]:
        """Return where all is that ``comparison`` looks for, and what has to stand there, beside
        hooks and what the code reads."""
        flags = [(part.__dict__, "training", False) for part in self.train_sensitive]
        if not is_exported(self.module):
            flags.append((self.module.__dict__, "training", False))
        return [*flags, *self._weights.places, *self._edges.places]

    @property
    def owned(self) -> list[Any]:
        """Return the tables whose entries ``comparison`` counts."""
        return self._owned

    def have_rows(self) -> bool:
        """Say whether each table of embeddings has as many rows as at the last scan."""
        return not self._tables or rows_of(self._tables) == self.rows

    def comparison(
        self, *, is_memory_known: bool = False, native: Callable[[Any], int] | None = None
    ) -> Callable[[], bool] | None:
        """Return a function that says whether all is as scanned: no module, setting or Parameter is
        another, no memory has moved, no part is in training mode or has hooks. Its answer is quick:
        False only says that a longer look is due. It may be used until the next scan.
        ``is_memory_known``: who asks has seen already that no memory of a weight has moved.
        ``native`` looks first (``native_look``); the answers are the same.

        A module with adapters gets None, and so does one with weights in 8 bits.
        """
        if self._adapted or self.effective or self.coded:
            return None
        weights, edges = self._weights, self._edges
        flags = [part.__dict__ for part in self.train_sensitive]
        owned, own = self._owned, self.module.__dict__
        has_mode = not is_exported(self.module)
        num_owned = sum(map(len, owned))
        is_alone = len(owned) == len(alone := _tables_of(self.module))
        first, second, third, fourth = alone
        tensors, pointers, own_hooks = self.tensors, self.pointers, self.hooks
        tables, rows = self._tables, self.rows
        placed = [] if is_memory_known else tensors
        layouts = self._memory.layouts

        def is_unchanged() -> bool:
            try:
                return not (
                    (has_mode and own["training"])
                    or (flags and any(map(_TRAINING, flags)))
                    or (tensors and not weights.hold())
                    or (edges.values and not edges.hold())
                    or (
                        len(first) + len(second) + len(third) + len(fourth)
                        if is_alone
                        else sum(map(len, owned))
                    )
                    != num_owned
                    or (placed and ([*map(_DATA_PTR, placed)] != pointers or layouts.differs()))
                    or (tables and rows_of(tables) != rows)
                    or (own_hooks and any(own_hooks) and any(map(is_untraced, own_hooks)))
                    or self.global_guards.have_changed()
                )
            except KeyError:
                return False

        if native is None:
            return is_unchanged
        return QuickLook(self, is_unchanged, num_owned, native, self._memory if placed else None)

    def scale_refusal(self, scale: float) -> str:
        """Say why this scale for all adapters, of one call, cannot be served, or nothing."""
        if any(hasattr(type(part), "scale_layer") for _, part in self.parts):  # peft's own
            return "a scale for all adapters, some of which peft computes beside the weights"
        if not self.effective:
            return ""
        if scale == 0:
            return (
                "a scale of 0 for all adapters has diffusers set the scales of each back after the"
                " call: disable_lora() turns them off"
            )
        return "" if scale == scale else "the scale for all adapters is no number"

    def remember(self, program: Program, placed: Sequence[Tensor | None]) -> None:
        """Take the present pointers as known. ``placed`` is as ``place`` gives it for a program;
        what is one piece there stays so from one binding to the next."""
        memory = self._memory
        is_known = len(memory.tensors) == len(self.tensors) and all(
            map(is_, memory.tensors, self.tensors)
        )
        if not is_known or memory.differs():
            self._memory = KnownMemory(self.tensors)
        merged, padded = pieces_of(program.inputs, placed)
        self.merged.add(merged)
        self.padded.add(padded)

    @contextmanager
    def moved_by_us(self) -> Iterator[None]:
        """Take where weights lie afterwards as known, if it was before: the next call need not look
        at the module anew. Nothing may be bound to the weights any more."""
        was_known = not self._memory.differs()
        yield
        if was_known:
            self._memory = KnownMemory(self.tensors)

    def release_pieces(self) -> None:
        """Let go of all weights that lie as programs want them."""
        self.merged.clear()
        self.padded.clear()
        self.coded.forget()

    def has_new_structure(self) -> bool:
        """Say whether modules, settings, processors, adapters, or names that the code reads, are
        others than at the last scan."""
        return self._has_new_parts() or self.global_guards.have_changed()

    def _has_new_parts(self) -> bool:
        try:
            if self.lazy or not self._edges.hold():
                return True
        except KeyError:  # gone
            return True
        if self._num_owned != self._count_owned():
            return True
        if self.effective.has_other_layers():
            return True
        return bool(self._adapted) and self.adapters != self._adapter_state()

    def ignore(self, labels: Set[str]) -> None:
        """Watch these names no longer: the module's own code writes them when it is traced, as
        caches. The structure is then that without them, as it will be at the next scan."""
        if not labels <= self._ignored:
            self._ignored |= labels
            self.global_guards = self._global_guards()
            self.structure = self._structure()

    def _global_guards(self) -> GlobalGuards:
        parts = int8_layers.read_by_code(self.parts)
        return GlobalGuards(parts, self._ignored | self.turned.labels)

    def clone(self) -> nn.Module:
        """Return a copy of the module that shares every tensor, to be traced, in which plain layers
        stand for those with adapters."""
        return clone_structure(self.module, self.effective.tables)

    def note_effects(self) -> tuple[tuple[str, Any], ...]:
        """Note what a call in eager has just changed of its surroundings as its own doing, and
        return all of it, by its names."""
        if not self.global_guards.have_changed():
            return ()
        changes = self.global_guards.changes()
        self.effects |= {change.label for change in changes}
        return tuple((change.label, change.now) for change in changes)

    def has_new_cause(self) -> bool:
        """Say whether anything but what the module itself changes is another than at the last
        scan."""
        if self._has_new_parts() or self.has_new_tensors():
            return True
        changes = self.global_guards.changes() if self.global_guards.have_changed() else []
        return not {change.label for change in changes} <= self.effects

    @property
    def pointers(self) -> list[int]:
        """Return where the tensors lay when they were last looked at."""
        return self._memory.pointers

    @property
    def wants(self) -> tuple[bool, ...]:
        """Say which tensors require a gradient."""
        return tuple(tensor.requires_grad for tensor in self.tensors)

    def has_new_tensors(self, *, is_memory_known: bool = False) -> bool:
        """Say whether a Parameter was replaced, or its memory moved unless it is known not to
        have."""
        try:
            same = self._weights.hold()
        except KeyError:
            return True
        return not same or (not is_memory_known and self.has_moved())

    def has_moved(self) -> bool:
        """Say whether the memory of a Parameter that was there at the last scan is another, or
        gone, or a table has other rows."""
        if rows_of(self._tables) != self.rows:
            return True
        return self._memory.differs()

    def _adapter_state(self) -> tuple[Any, ...]:
        """Tell what peft layers do besides their weights: who is active, with what scale."""
        return tuple(
            (
                tuple(layer.active_adapters),
                self.turned.form_of(path, "scaling") or tuple(sorted(layer.scaling.items())),
                layer.disable_adapters,
                tuple(layer.merged_adapters),
            )
            for path, layer in self._adapted
        )

    def settings(self, path: str, part: nn.Module) -> dict[str, Any]:
        """Return the plain attributes of a part, and of turned ones only the form. Numbers of rows
        that no code reads are none."""
        found, unread = settings_of(part), self.global_guards.unread
        absent = {n for n, value in found.items() if value is None and is_scale(part, n)}
        kept = found.keys() - unread - absent
        return {n: self.turned.form_of(path, n) or found[n] for n in found if n in kept}

    @property
    def devices(self) -> list[torch.device]:
        """Return on which device each tensor lies, or is to lie when programs run."""
        return [self.place or tensor.device for tensor in self.tensors]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all state, of tables without the number of rows, which is data."""
        tables = {*self.tables}
        named = zip(self.names, self.tensors, strict=True)
        return [tuple(t.shape[1:] if n in tables else t.shape) for n, t in named]

    def _structure(self) -> int:
        """Return a hash of names, classes, processors, adapters, shapes and dtypes."""
        modules = tuple(
            (
                path,
                type(m),
                type(m.__dict__.get("processor")),
                repr(sorted(self.settings(path, m).items())),
                graph_text(m),
            )
            for path, m in self.parts
        )
        state = tuple(
            (n, shape, layout_of(t, device), t.dtype, device)
            for n, t, shape, device in zip(
                self.names, self.tensors, self.shapes, self.devices, strict=True
            )
        )
        objects = {id(value): value for value in self.global_guards.objects}
        self._kept.update(objects)
        names = (*self.global_guards.text, *self.global_guards.containers, *objects)
        found = (self.casts, self.computed, self.shards)
        made = (self.make_ups, *(tuple(hooks.items()) for hooks in found), self.exchanges_with)
        return hash((modules, state, *made, self.adapters, names, self.tied))


def _tables_of(part: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return where a module holds what has a name: another number of entries is another module."""
    return part.__dict__, part._modules, part._parameters, part._buffers


def layout_of(t: Tensor, device: torch.device) -> tuple[int, ...] | None:
    """Return the strides, or None for a contiguous tensor. On a GPU a channels-last one gives None
    too: ``place`` itself lays weights of convolutions out so. Elsewhere eager's convolutions give
    channels-last results for these."""
    is_usual = t.dim() == 4 and device.type == "cuda"
    if t.is_contiguous() or (is_usual and t.is_contiguous(memory_format=torch.channels_last)):
        return None
    return t.stride()


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module: numbers, texts, functions, and containers of those,
    decide what a forward does."""
    found = {
        k: v
        for k, v in own_attributes(module)
        if not (k.startswith("_") or k == "forward" or is_left_over(module, k)) and is_plain(v)
    }
    # what was None and then a module is kept elsewhere when it is None again
    gone = (k for k, part in module._modules.items() if part is None)
    return found | {k: None for k in gone if not is_left_over(module, k)}


def rows_of(tables: Sequence[Tensor]) -> tuple[int, ...]:
    """Return how many rows tables have, in half of the time that ``len`` takes for each."""
    return tuple(map(_SIZE, tables, repeat(0)))
