"""A module is looked at in native code: whether names stand for the objects that they stood for.

A look in Python takes an interpreter some 30 to 50 ns for each name, of which a small network has a
thousand. This does the same in one call, and runs no code of Python: dictionaries, cells and lists
are read by functions of CPython's that are in all of its builds, so that no header is needed. Its
answer is quick: "no" means that a look in Python has to say what is so.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from strop.dispatch.watched_tables import ABSENT, Cell, Unbound
from strop.errors import CodegenError
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels

Place = tuple[Any, str, Any]  # a table, a key, and what that has to stand for
_TEXT = """
struct Object;
typedef long Size;
extern "C" {
Object* PyDict_GetItemWithError(Object*, Object*);
Object* PyCell_Get(Object*);
Object* PyObject_Type(Object*);
Object* PyList_GetItem(Object*, Size);
Size PyDict_Size(Object*);
Size PyList_Size(Object*);
int PyDict_Next(Object*, Size*, Object**, Object**);
void Py_DecRef(Object*);
}

// Numbers of things of each kind, each with the addresses of the arrays that it has.
struct Look {
    Size entries; Object** tables; Object** keys; Object** values;
    Size cells; Object** holders; Object** held;
    Size types; Object** objects; Object** kinds;
    Size sizes; Object** sized; Size* counts;
    Size lists; Object** listed; Size* lengths; Object** items;
    Size dicts; Object** filled; Size* numbers; Object** pairs;  // numbers of items
};

static bool is_same(Object* found, Object* known) {
    if (found) Py_DecRef(found);  // somebody else holds what is known
    return found == known;
}

static bool holds(const Look& look) {
    for (Size i = 0; i < look.entries; ++i)
        if (PyDict_GetItemWithError(look.tables[i], look.keys[i]) != look.values[i]) return false;
    for (Size i = 0; i < look.cells; ++i)
        if (!is_same(PyCell_Get(look.holders[i]), look.held[i])) return false;
    for (Size i = 0; i < look.types; ++i)
        if (!is_same(PyObject_Type(look.objects[i]), look.kinds[i])) return false;
    for (Size i = 0; i < look.sizes; ++i)
        if (PyDict_Size(look.sized[i]) != look.counts[i]) return false;
    Object* const* item = look.items;
    for (Size i = 0; i < look.lists; ++i) {
        if (PyList_Size(look.listed[i]) != look.lengths[i]) return false;
        for (Size n = 0; n < look.lengths[i]; ++n)
            if (PyList_GetItem(look.listed[i], n) != *item++) return false;
    }
    item = look.pairs;
    for (Size i = 0; i < look.dicts; ++i) {
        Size place = 0, count = 0;
        for (Object *key, *value; PyDict_Next(look.filled[i], &place, &key, &value); ++count) {
            if (2 * count == look.numbers[i]) return false;  // there is no more to compare with
            if (key != *item++ || value != *item++) return false;
        }
        if (2 * count != look.numbers[i]) return false;
    }
    return true;
}

extern "C" int strop_look(const Look* look) { return holds(*look); }
"""
SOURCE = KernelSource("strop_look", "cpp", _TEXT, (), ())


@cache
def native_look(cache_dir: str) -> tuple[Any, str]:
    """Return the function that looks, or None and the reason why there is none. It is compiled
    once, and kept in the cache folder."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "it needs CPython with its global lock"
    try:
        kernels = NativeKernels(DiskCache(Options(cache_dir=cache_dir).cache_path))
        kernels.make([SOURCE])
        path, symbol = kernels.place(SOURCE)
        function = ctypes.PyDLL(str(path))[symbol]  # which keeps the global lock
    except (CodegenError, OSError) as error:
        return None, str(error)
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_void_p,)
    return function, ""


_BUILDS: dict[str, Future[tuple[Any, str]]] = {}
_LOCK = threading.Lock()


def look_if_ready(cache_dir: str) -> tuple[Any, str] | None:
    """Return what ``native_look`` returns, or None while another thread compiles it: no call waits
    for a compiler."""
    with _LOCK:
        build = _BUILDS.get(cache_dir)
        if build is None:
            compiler = ThreadPoolExecutor(1, "strop-native-look")
            build = _BUILDS[cache_dir] = compiler.submit(native_look, cache_dir)
            compiler.shutdown(wait=False)  # when it is done
    return build.result() if build.done() else None


@dataclass(frozen=True, slots=True)
class Watched:
    """This is what a look compares: what names stand for, how many entries tables have, classes of
    objects, and what containers hold (a dictionary's keys and then its values)."""

    places: Sequence[Place]
    owned: Sequence[Any]
    num_owned: int  # in all of these tables
    kinds: Sequence[tuple[Any, type]]
    contents: Sequence[tuple[Any, Any]]


class NativeLook:
    """This compares all that is watched with what it was."""

    def __init__(self, function: Callable[[Any], int], watched: Watched) -> None:
        """Tables that the native code cannot read are compared in Python, and who asks has to
        compare ``others``: containers that it cannot read, with what they hold."""
        exact = {list, dict, tuple}  # of which a tuple holds what it held
        self.others = [pair for pair in watched.contents if type(pair[0]) not in exact]
        self._rest: list[Place] = []
        self._owned = [t for t in watched.owned if _dictionary(t) is None]
        sized = [(held, len(held)) for t in watched.owned if (held := _dictionary(t)) is not None]
        self._num_owned = watched.num_owned - sum(count for _, count in sized)
        self._kept: list[Any] = [watched]  # the native code has addresses of these
        numbers = [
            *self._names(watched.places),
            *self._columns(watched.kinds, 2),
            *(len(sized), self._addresses(held for held, _ in sized)),
            self._array(count for _, count in sized),
            *self._filled([pair for pair in watched.contents if type(pair[0]) is list]),
            *self._filled([_paired(*p) for p in watched.contents if type(p[0]) is dict]),
        ]
        self._call = partial(function, ctypes.c_void_p(self._array(numbers)))

    def holds(self) -> bool:
        """Tell whether all but ``others`` is as it was. No is not the last word: a number may have
        been bound anew to an equal one. KeyError where an entry is gone."""
        return (
            self._call() == 1
            and sum(map(len, self._owned)) == self._num_owned
            and all(table[key] is then for table, key, then in self._rest)
        )

    def _names(self, places: Sequence[Place]) -> list[int]:
        """Return the parts of the look for entries of dictionaries, and for variables of enclosing
        functions."""
        entries, cells = list[Place](), list[tuple[Any, Any]]()
        for place in places:
            table, key, value = place
            if isinstance(table, Cell):
                cells.append((table.cell, value))
            elif (held := _dictionary(table)) is not None:
                entries.append((held, key, value))
            else:
                self._rest.append(place)
        return [*self._columns(entries, 3), *self._columns(cells, 2)]

    def _filled(self, contents: Sequence[tuple[Any, Sequence[Any]]]) -> list[int]:
        """Return the part of the look for what containers hold."""
        held, counts = (c for c, _ in contents), (len(known) for _, known in contents)
        items = chain.from_iterable(known for _, known in contents)
        return [len(contents), self._addresses(held), self._array(counts), self._addresses(items)]

    def _columns(self, rows: Sequence[tuple[Any, ...]], count: int) -> list[int]:
        return [len(rows), *(self._addresses(row[n] for row in rows) for n in range(count))]

    def _addresses(self, objects: Iterable[Any]) -> int:
        """Return where the addresses of objects lie, which live as long as this does."""
        held = list(objects)
        self._kept.append(held)
        return self._array(0 if value is ABSENT else id(value) for value in held)

    def _array(self, numbers: Iterable[int]) -> int:
        found = np.fromiter(numbers, np.int64)
        self._kept.append(found)
        return int(found.ctypes.data)


def _dictionary(table: Any) -> Any:
    """Return the dictionary that holds the entries of a table, or None for a table of another
    kind."""
    if isinstance(table, Unbound):
        table = table.table
    if isinstance(table, MappingProxyType):  # of a class, which keeps its dictionary for good
        held = gc.get_referents(table)
        table = held[0] if len(held) == 1 else None
    return table if type(table) in (dict, OrderedDict) else None


def _paired(held: Any, known: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a dictionary with its items, one behind the other: ``known`` has all keys first."""
    half = len(known) // 2
    return held, [item for pair in zip(known[:half], known[half:], strict=True) for item in pair]
