"""Say no to a request, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.errors import StropError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "cancelled_error",
}


class Refused(StropError):
    """A request cannot be served. ``code`` is a word for programs, ``field`` what is wrong, and
    ``retry_after_s`` when to ask again."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.field = status, code, field
        self.retry_after_s = retry_after_s

    def in_words_of(self, names: Mapping[str, str]) -> Refused:
        """Return the same with the name that an interface has for the field: ``names`` has it by
        Strop's own name."""
        name = names.get(self.field or "")
        if name is None:
            return self
        text = f"{name}: {str(self).removeprefix(f'{self.field}: ')}"
        wait = self.retry_after_s
        return Refused(self.status, self.code, text, field=name, retry_after_s=wait)

    @property
    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found

    @property
    def body(self) -> dict[str, Any]:
        """Return one shape for all interfaces: OpenAI's ``error``, A1111's ``detail``."""
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": _TYPES.get(self.status, server),
            "param": self.field,
            "code": self.code,
        }
        return {"error": error, "detail": str(self)}
