"""Classes of tensors that hold codes and scales, as those of torchao, quanto and diffusers do."""

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn


class _Codes(torch.Tensor):
    """An int8 matrix with a scale for each row."""

    def __new__(cls, codes, scale, bits=8):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes, scale, bits=8):
        self.codes, self.scale, self.bits = codes, scale, bits

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], **context)

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale * (self.bits / 8)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            whole = args[0]
            return cls(func(whole.codes), func(whole.scale), whole.bits)
        args, kwargs = pytree.tree_map_only(_Codes, lambda t: t.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


class ByOperators(_Codes):
    """A class with a rule for operators alone, which computes with the matrix."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class ByFunctions(_Codes):
    """A class with a rule for linears, which scales the product of codes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            rows = x.reshape(-1, x.shape[-1]) @ weight.codes.t().to(x.dtype)
            y = (rows * weight.scale.flatten() * (weight.bits / 8)).reshape(*x.shape[:-1], -1)
            return y if bias is None else y + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Dynamic(_Codes):
    """A class whose linears quantise the rows of x too, for a product of integers."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            rows = x.reshape(-1, x.shape[-1])
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-5) / 127
            codes = (rows / scale).round().clamp(-127, 127).to(torch.int8)
            y = torch._int_mm(codes, weight.codes.t()).to(x.dtype) * scale
            y = (y * weight.scale.flatten()).reshape(*x.shape[:-1], -1)
            return y if bias is None else y + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Packed(torch.Tensor):
    """Bytes of two codes each, which look like an int8 matrix."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, packed):
        shape = (packed.shape[0], 2 * packed.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.int8)

    def __init__(self, packed):
        self.packed = packed

    @classmethod
    def of(cls, codes):
        low, high = (codes.clamp(-8, 7) + 8).to(torch.uint8).chunk(2, 1)
        return cls(low | (high << 4))

    def __tensor_flatten__(self):
        return ["packed"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["packed"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].packed))
        args, kwargs = pytree.tree_map_only(Packed, lambda t: t.unpack(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def unpack(self):
        both = torch.cat([self.packed & 0x0F, self.packed >> 4], 1)
        return both.to(torch.int8) - 8


class Nested(ByOperators):
    """A class that holds codes of another class."""

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 7
        return cls(Packed.of((weight / scale).round().to(torch.int8)), scale)


class Blocks(nn.Parameter):
    """Bytes in memory of their own: 4 of a scale in fp32, and 32 codes, as GGUF has them."""

    def __new__(cls, data, kind="int8"):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.kind = kind
        return self

    @classmethod
    def of(cls, weight):
        blocks = weight.reshape(len(weight), -1, 32)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        codes = (blocks / scale).round().to(torch.int8).view(torch.uint8)
        return cls(torch.cat([scale.float().view(torch.uint8), codes], -1).reshape(len(weight), -1))

    def as_tensor(self):
        return torch.Tensor._make_subclass(torch.Tensor, self, False)


class BlockLinear(nn.Linear):
    def forward(self, x):
        blocks = self.weight.as_tensor().reshape(self.out_features, -1, 36)
        scale, codes = blocks[..., :4].view(torch.float32), blocks[..., 4:].view(torch.int8)
        scale = scale * (0.5 if self.weight.kind == "half" else 1)
        weight = (scale * codes).reshape(self.out_features, -1)
        return F.linear(x, weight.to(x.dtype), self.bias)


class State:
    """Scales of a matrix of codes, and those of the scales."""

    def __init__(self, scale, inner=None, bits=8):
        self.scale, self.inner, self.bits = scale, inner, bits


class Stated(nn.Parameter):
    """Codes in memory of their own, beside an object with scales, as bitsandbytes has them."""

    def __new__(cls, codes, state=None):
        self = torch.Tensor._make_subclass(cls, codes, False)
        self.state = state
        return self

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        inner = State(scale.mean())
        return cls((weight / scale).round().to(torch.int8), State(scale / inner.scale, inner))


class StatedLinear(nn.Linear):
    """A layer that holds its weight's object, too, as bitsandbytes' does."""

    def forward(self, x):
        state = self.weight.state
        scale = state.scale * state.inner.scale * (state.bits / 8)
        return F.linear(x, self.weight.to(x.dtype) * scale, self.bias)


class Net(nn.Module):
    """Two linears, an activation and a norm."""

    def __init__(self, width=64, linear=nn.Linear):
        super().__init__()
        self.a, self.b = linear(width, 2 * width), linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.b(F.silu(self.a(x))))


LINEARS = {Blocks: BlockLinear, Stated: StatedLinear}


def quantised(kind, module):
    """Put weights of this class into all linears of a module."""
    for part in list(module.modules()):
        if isinstance(part, nn.Linear):
            weight = kind.of(part.weight.detach())
            part.weight = (
                weight
                if isinstance(weight, nn.Parameter)
                else nn.Parameter(weight, requires_grad=False)
            )
            if kind is Stated:
                part.state = weight.state
    return module.eval().requires_grad_(False)


def _full(weight):
    """Dequantise in fp64."""
    if isinstance(weight, Blocks):
        blocks = weight.as_tensor().reshape(len(weight), -1, 36)
        scale, codes = blocks[..., :4].view(torch.float32), blocks[..., 4:].view(torch.int8)
        return (scale.double() * codes.double()).reshape(len(weight), -1)
    if isinstance(weight, Stated):
        state = weight.state
        return weight.data.double() * state.scale.double() * state.inner.scale.double()
    codes = weight.codes.unpack() if isinstance(weight.codes, Packed) else weight.codes
    return codes.double() * weight.scale.double() * (weight.bits / 8)


def exact(net, x):
    """Compute in fp64 what a net of such weights computes."""
    wide = Net().double().requires_grad_(False)
    for name in ("a", "b"):
        own, part = net.get_submodule(name), wide.get_submodule(name)
        part.weight.copy_(_full(own.weight))
        part.bias.copy_(own.bias)
    return wide(x.double())
