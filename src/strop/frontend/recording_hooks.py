"""Tell which hooks of a library do nothing now.

transformers puts hooks on the layers of its models once, to collect hidden states and attentions
for calls that ask for them. In all other calls they return at once.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

MODULE = "transformers.utils.output_capturing"
_NAME = "output_capturing_hook"
_BEHIND = "_forward_hooks"
_OTHERS = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A forward that stands in the place of a module's own runs between these.
_AROUND = frozenset((_BEHIND, "_forward_pre_hooks"))
HOOK_TABLES = frozenset(
    name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name
)


def has_hooks(part: nn.Module, *, is_outermost: bool = False) -> bool:
    """Tell whether hooks do something when the module runs. ``is_outermost``: its own forward is
    what is asked about, and not what is done around it."""
    own = vars(part)
    around = _AROUND if is_outermost else frozenset()
    if any(own.get(name) for name in _OTHERS if name not in around):
        return True
    if _BEHIND in around:
        return False
    return not all(map(_is_idle, own.get(_BEHIND, {}).values()))


def _is_idle(hook: Any) -> bool:
    """Tell whether a hook would record what nobody has asked for."""
    if getattr(hook, "__module__", "") != MODULE or hook.__name__ != _NAME:
        return False
    names = hook.__code__.co_freevars
    cells = {n: c.cell_contents for n, c in zip(names, hook.__closure__ or (), strict=True)}
    wanted = sys.modules[MODULE]._active_collector.get()
    return wanted is None or cells["key"] not in wanted
