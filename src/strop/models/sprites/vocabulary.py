"""Writes the vocabulary of the CLIP tokenizer: every word of the grammar is one token.

The file formats are those of CLIP's byte-level BPE (Radford et al. 2021): `vocab.json` maps
tokens to ids, `merges.txt` lists the merges by rank, "</w>" ends a word. All single bytes are in
the vocabulary too, so any text at all can be encoded.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from strop.models.sprites.grammar import words

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

BEGIN, END = "<|startoftext|>", "<|endoftext|>"


def _byte_symbols() -> list[str]:
    """Return the printable stand-in of each byte, as GPT-2's byte-level BPE assigns them."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = 0
    symbols = []
    for byte in range(256):
        if byte in visible:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + hidden))
            hidden += 1
    return symbols


def merges() -> list[tuple[str, str]]:
    """Return merges by rank that turn every word of the grammar into a single token."""
    ranked: list[tuple[str, str]] = []
    for word in words():
        symbols = _apply([*word[:-1], word[-1] + "</w>"], ranked)
        while len(symbols) > 1:
            # A later merge ranks lower, so it never takes symbols from an earlier word.
            ranked.append((symbols[0], symbols[1]))
            symbols = [symbols[0] + symbols[1], *symbols[2:]]
    return ranked


def _apply(symbols: list[str], ranked: list[tuple[str, str]]) -> list[str]:
    ranks = {pair: rank for rank, pair in enumerate(ranked)}
    while True:
        pairs = [(ranks.get(pair, -1), i) for i, pair in enumerate(pairwise(symbols))]
        known = [pair for pair in pairs if pair[0] >= 0]
        if not known:
            return symbols
        _, at = min(known)
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


def write(folder: Path) -> None:
    """Write `vocab.json` and `merges.txt` into `folder`."""
    ranked = merges()
    symbols = _byte_symbols()
    tokens = [*symbols, *(s + "</w>" for s in symbols), *(a + b for a, b in ranked), BEGIN, END]
    ids = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in ranked), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


def build(folder: Path, length: int) -> "CLIPTokenizer":
    """Write the vocabulary into `folder` and return the tokenizer with rows of `length` ids."""
    from transformers import CLIPTokenizer

    write(folder)
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return CLIPTokenizer(vocab=vocab, merges=merges(), model_max_length=length)


def word_ids(tokenizer: "CLIPTokenizer") -> dict[str, int]:
    """Return the token id of each word of the grammar.

    Raises:
        ValueError: a word is not a single token of `tokenizer`.
    """
    ids: dict[str, int] = {}
    for word in words():
        row = tokenizer(word, add_special_tokens=False).input_ids
        if len(row) != 1:
            raise ValueError(f"word {word!r} became tokens {row}, expected one; rebuild merges.txt")
        ids[word] = row[0]
    return ids
