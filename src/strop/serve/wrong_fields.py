"""Say which fields of a request are wrong, without a word of what the client has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.serve.refused import Refused

_MOST = 5


def refused_for(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """Turn the errors of pydantic into one. Names of fields are the client's, too, if nobody knows
    them: they are cut, and written in ASCII."""
    if any(error["type"] == "json_invalid" for error in errors):
        return Refused(400, "no_json", "the body is no JSON")
    told = [f"{_path(error)}: {_reason(error)}" for error in errors[:_MOST]]
    return Refused(422, "invalid_value", "; ".join(told), field=_path(errors[0]))


def _reason(error: Mapping[str, Any]) -> str:
    """Say what is wrong: in pydantic's words, but where these are about its own rules."""
    known = {
        "extra_forbidden": "this server does not know it; leave it out",
        "missing": "it is missing",
    }
    return known.get(error["type"]) or in_ascii(str(error["msg"]))


def _path(error: Mapping[str, Any]) -> str:
    parts = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    return in_ascii(".".join(parts)) or "body"


def in_ascii(text: str, most: int = 200) -> str:
    """Return what a client wrote so that it can be shown: cut, and in ASCII."""
    return text[:most].encode("ascii", "backslashreplace").decode()
