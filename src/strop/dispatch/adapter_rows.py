"""Have pictures of one batch take adapters of their own: one call serves several users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.low_rank_weights import RowAdapters
from strop.errors import OptionError
from strop.wording import counted


@contextmanager
def rows_taken(dispatchers: Mapping[str, Dispatcher], rows: RowAdapters) -> Iterator[None]:
    """Serve rows of all modules that have such adapters by these in the body. Raises OptionError
    for a name that no module has."""
    served = {name: d for name, d in dispatchers.items() if _adapters_of(d)}
    known = {adapter for d in served.values() for adapter in _adapters_of(d)}
    unknown = [name for name in rows.names if name is not None and name not in known]
    if unknown:
        raise OptionError(
            f"strop.lora_rows: no optimised module has an adapter {', '.join(unknown)};"
            f" there are {', '.join(sorted(known)) or 'none'}"
        )
    if any(d.state.effective.rows is not None for d in served.values()):
        raise OptionError("strop.lora_rows is in force already: it cannot be nested")
    begun = list[Dispatcher]()
    try:
        for dispatcher in served.values():
            dispatcher.take_rows(rows)
            begun.append(dispatcher)
        yield
    finally:
        for dispatcher in begun:
            dispatcher.take_rows(None)


def row_adapters(names: Sequence[str | None], scales: Sequence[float] | None = None) -> RowAdapters:
    """Check what a user has given. Raises OptionError."""
    if isinstance(names, str) or not all(n is None or isinstance(n, str) for n in names):
        raise OptionError(f"strop.lora_rows takes a list of names, each a text or None: {names!r}")
    given = tuple(names)
    factors = tuple(map(float, scales)) if scales is not None else (1.0,) * len(given)
    if not given or len(factors) != len(given):
        raise OptionError(
            f"strop.lora_rows got {counted(len(given), 'name')} and"
            f" {counted(len(factors), 'scale')}; it takes one of each for every picture"
        )
    return RowAdapters(given, factors)


def _adapters_of(dispatcher: Dispatcher) -> set[str]:
    if not dispatcher.folds_adapters:
        return set()
    factors = (getattr(part, "lora_A", {}) for part in dispatcher.module.modules())
    return {name for given in factors for name in given}
