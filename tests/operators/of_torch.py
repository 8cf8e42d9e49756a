"""Torch's tables of operators and of modules, and their samples.

Their module forbids the whole process to set the flags of ``torch.backends``, which other tests do:
that call is left out while the module is imported.
"""

from __future__ import annotations

from unittest import mock

import torch

with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = [
    "ModuleInfo",
    "ModuleInput",
    "OpInfo",
    "SampleInput",
    "invocations",
    "module_db",
    "op_db",
]

op_db = invocations.op_db
