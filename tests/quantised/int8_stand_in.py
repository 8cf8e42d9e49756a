"""A linear that multiplies codes, and larger columns apart, as bitsandbytes' LLM.int8 does.

Codes and scales are in the weight until the layer runs in eager, and in its state from then on.
"""

import torch
import torch.nn.functional as F
from torch import nn

THRESHOLD = 6.0


class State:
    def __init__(self, threshold):
        self.threshold, self.has_fp16_weights, self.is_training = threshold, False, True
        self.CB = self.SCB = self.idx = None


class Codes(nn.Parameter):
    """An int8 matrix that holds itself and the scales of its rows, which a copy has apart."""

    def __new__(cls, data, codes=None, scales=None):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.CB, self.SCB = codes, scales
        return self

    @classmethod
    def of(cls, weight):
        scales = weight.float().abs().amax(1)
        codes = (weight.float() * (127 / scales)[:, None]).round().to(torch.int8)
        return cls(codes, codes, scales)

    def __deepcopy__(self, memo):
        held = (None if t is None else t.clone() for t in (self.CB, self.SCB))
        return type(self)(self.data.clone(), *held)


class CodedLinear(nn.Linear):
    def __init__(self, *sizes, threshold=THRESHOLD, **how):
        super().__init__(*sizes, **how)
        self.state, self.weight = State(threshold), Codes.of(self.weight.detach())

    def forward(self, x):
        self.state.is_training = self.training
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]) if x.dim() == 3 else x
        y = self.product(rows, self.state.CB, self.state.SCB)
        self.weight.data = self.state.CB
        return y.reshape(*x.shape[:-1], -1) if x.dim() == 3 else y

    def product(self, rows, codes, scales):
        half = rows.to(torch.float16)
        larger = half.abs() >= self.state.threshold if self.state.threshold else half != half
        kept = half.masked_fill(larger, 0)
        most = kept.abs().amax(1).float()
        given = (kept * (127 / most)[:, None]).nan_to_num().round()
        given[:, larger.any(0)] = 0
        y = (given.double() @ codes.double().t()).float() * most[:, None] * scales / 127**2
        y = (y if self.bias is None else y + self.bias).to(rows.dtype)
        self.state.idx = larger.any(0).argwhere().view(-1)
        if len(self.state.idx):
            weight = codes[:, self.state.idx] * scales[:, None] / 127
            y = y.addmm(rows[:, self.state.idx], weight.to(rows.dtype).t())
        return y


class Net(nn.Module):
    """Two such linears with an activation between."""

    def __init__(self, width=64, **how):
        super().__init__()
        self.a = CodedLinear(width, 2 * width, **how)
        self.b = CodedLinear(2 * width, width, **how)

    def forward(self, x):
        return self.b(F.silu(self.a(x)))


def net(dtype=torch.float16, **how):
    torch.manual_seed(0)
    made = Net(**how).eval().requires_grad_(False)
    for part in (made.a, made.b):
        part.bias.data = part.bias.data.to(dtype)
    return made


def given(*shape, dtype=torch.float16, larger=3):
    """Random values, of which a few columns hold larger ones."""
    made = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=made)
    x.view(-1, shape[-1])[:1, :larger] = 20
    return x.to(dtype)
