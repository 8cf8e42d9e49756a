"""Say what a model will not read of a prompt."""

from __future__ import annotations

from typing import Any

from strop.wording import counted

MOST_TOKENS = 1_000_000  # tokenizers without a limit name a huge one


def unread(pipe: Any, prompt: str, what: str = "prompt") -> str:
    """Return a sentence on the end of a prompt that is too long for the model, which diffusers
    cuts, or nothing."""
    tokenizer = getattr(pipe, "tokenizer", None)
    limit = getattr(tokenizer, "model_max_length", 0)
    if tokenizer is None or not 0 < limit < MOST_TOKENS:
        return ""
    ids = tokenizer(prompt, truncation=False, verbose=False).input_ids
    if len(ids) <= limit:
        return ""
    rest = tokenizer.decode(ids[limit - 1 :], skip_special_tokens=True).strip()
    return (
        f"the {what} has {counted(len(ids) - 2, 'token')}, of which this model reads"
        f" {limit - 2}; it ignores the end: {rest!r}"
    )
