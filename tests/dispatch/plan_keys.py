"""Under which keys plans are looked for on disk."""

from __future__ import annotations

from typing import Any

import pytest

from strop.dispatch import stored_variants


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that the key of each graph will be added to, before it is looked for."""
    keys, key_of = list[str](), stored_variants.key_of

    def noting(*args: Any) -> str:
        keys.append(key_of(*args))
        return keys[-1]

    monkeypatch.setattr(stored_variants, "key_of", noting)
    return keys
