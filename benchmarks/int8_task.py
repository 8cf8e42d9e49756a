"""Measure what int8 costs a model on a task: a small BERT that is trained here, and then quantised.

    python benchmarks/int8_task.py --out FILE [--steps 300] [--sentences 4000]

A generator makes reviews of some phrases, "very good", "not a bit slow", whose words are worth one
or two points, turned around behind a negation. A review is bad, mixed or good by its sum, and the
model has to say which. BERT-mini's architecture learns it from fresh sentences, in fp32 on one
thread, in some minutes. It is then judged on sentences that it has not seen: in fp32, in bf16 with
Strop, and quantised by torchao to int8 with dynamic rows and to int8 weights alone, each in eager
and with Strop. The share of right answers may be half a percent below that of fp32.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import strop
from strop.bench import environment
from strop.bench.report import write_json

GOOD = ("good", "fine", "quick", "warm", "bright", "kind", "clever", "fresh")
BAD = ("bad", "poor", "slow", "cold", "dull", "rude", "silly", "stale")
STRONG, NOT, NEUTRAL = ("very", "quite"), ("not", "hardly"), ("the", "film", "was", "and", "it")
WORDS = ("[pad]", "[cls]", *GOOD, *BAD, *STRONG, *NOT, *NEUTRAL)
NUMBER = {word: number for number, word in enumerate(WORDS)}
LENGTH, FEWEST, MOST = 13, 1, 3  # tokens; phrases of a review
LABELS = 3
BATCH, RATE = 32, 2e-4
ALLOWED = 0.005  # of right answers, below fp32


@dataclass(frozen=True, slots=True)
class Reviews:
    """Hold token numbers (B, LENGTH), marks of tokens (B, LENGTH), and labels (B,)."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def review(draw: random.Random) -> tuple[list[str], int]:
    """Return the words of a review, and 0, 1 or 2 for bad, mixed or good."""
    words, total = ["[cls]"], 0
    for _ in range(draw.randint(FEWEST, MOST)):
        words += draw.sample(NEUTRAL, draw.randint(0, 1))
        is_good, is_turned, is_strong = (draw.random() < share for share in (0.5, 0.15, 0.3))
        words += [draw.choice(NOT)] * is_turned + [draw.choice(STRONG)] * is_strong
        words.append(draw.choice(GOOD if is_good else BAD))
        total += (1 if is_good is not is_turned else -1) * (2 if is_strong else 1)
    return words, 1 + (total > 0) - (total < 0)


def reviews(count: int, seed: int) -> Reviews:
    draw, ids, labels = random.Random(seed), torch.zeros(count, LENGTH, dtype=torch.long), []
    for row in ids:
        words, label = review(draw)
        row[: len(words)] = torch.tensor([NUMBER[word] for word in words])
        labels.append(label)
    return Reviews(ids, (ids != 0).long(), torch.tensor(labels))


class Judge(nn.Module):
    """Gives the logits of LABELS."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=LENGTH,
            num_labels=LABELS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        config._attn_implementation = "sdpa"
        self.whole = BertForSequenceClassification(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.whole(input_ids=ids, attention_mask=mask).logits
        return logits


def trained(steps: int) -> Judge:
    torch.manual_seed(0)
    model = Judge().train()
    rule = torch.optim.AdamW(model.parameters(), lr=RATE)
    pace = torch.optim.lr_scheduler.OneCycleLR(rule, RATE, total_steps=steps)
    for step in range(steps):
        batch = reviews(BATCH, 1 + step)
        loss = F.cross_entropy(model(batch.ids, batch.mask), batch.labels)
        rule.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        pace.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval().requires_grad_(False)


def contenders(model: Judge) -> dict[str, nn.Module]:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    bf16 = copy.deepcopy(model).bfloat16()
    found: dict[str, Any] = {"eager fp32": model, "strop bf16": strop.optimize(copy.deepcopy(bf16))}
    for name, config in (
        ("int8", Int8DynamicActivationInt8WeightConfig),
        ("int8 weights", Int8WeightOnlyConfig),
    ):
        codes = copy.deepcopy(bf16)
        quantize_(codes, config(version=2, set_inductor_config=False))
        found[f"eager {name}"] = codes
        found[f"strop {name}"] = strop.optimize(copy.deepcopy(codes))
    return found


def answers(model: nn.Module, asked: Reviews) -> Tensor:
    parts = zip(asked.ids.split(BATCH), asked.mask.split(BATCH), strict=True)
    return torch.cat([model(ids, mask).argmax(-1) for ids, mask in parts])


def rows(model: Judge, asked: Reviews) -> Sequence[dict[str, Any]]:
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, each in contenders(model).items():
            found[name] = answers(each, asked)
    exact = found["eager fp32"]
    return [
        {
            "model": name,
            "right": (given == asked.labels).double().mean().item(),
            "as fp32": (given == exact).double().mean().item(),
        }
        for name, given in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sentences", type=int, default=3000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(trained(args.steps), reviews(args.sentences, 0))
    for row in found:
        print(row)
    here = environment.describe(torch.device("cpu"))
    sizes = {"steps": args.steps, "sentences": args.sentences}
    write_json({"kind": "int8_task", "environment": here, **sizes, "rows": found}, args.out)
    least = found[0]["right"] - ALLOWED
    return int(any(row["right"] < least for row in found))


if __name__ == "__main__":
    sys.exit(main())
