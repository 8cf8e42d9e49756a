"""List actions on the weights of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune


def other_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return random values for every floating-point entry of its state."""
    g = torch.Generator().manual_seed(9)
    return {
        name: (torch.randn(t.shape, generator=g) * 0.1).to(t) if t.is_floating_point() else t
        for name, t in module.state_dict().items()
    }


def first_layer(module: nn.Module, *kinds: type[nn.Module]) -> Any:
    """Return the first layer that holds a weight of its own and lies in a block, else the first of
    all."""
    wanted = kinds or (nn.Linear, nn.Conv2d, nn.Conv3d)
    layers = [(name, m) for name, m in module.named_modules() if type(m) in wanted]
    deep = [m for name, m in layers if name.count(".") >= 2]
    return (deep or [m for _, m in layers])[0]


def load_state_dict(module: nn.Module) -> None:
    module.load_state_dict(other_weights(module))


def load_state_dict_assign(module: nn.Module) -> None:
    module.load_state_dict(other_weights(module), assign=True)


def copy_in_place(module: nn.Module) -> None:
    new = other_weights(module)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(new[name])


def data_copy(module: nn.Module) -> None:
    new = other_weights(module)
    for name, p in module.named_parameters():
        p.data.copy_(new[name])


def data_assigned(module: nn.Module) -> None:
    new = other_weights(module)
    for name, p in module.named_parameters():
        p.data = new[name]


def one_data_assigned(module: nn.Module) -> None:
    """Assign the data of one part of a merged weight; the other parts stay where they are."""
    keys = [p for name, p in module.named_parameters() if name.endswith("to_k.weight")]
    weight = keys[len(keys) // 2] if keys else first_layer(module).weight
    weight.data = torch.linspace(-0.5, 0.5, weight.numel()).reshape(weight.shape).to(weight)


def data_assigned_transposed(module: nn.Module) -> None:
    for p in module.parameters():
        if p.dim() == 2:
            p.data = (p.data * 2).t().contiguous().t()


def new_parameter(module: nn.Module) -> None:
    layer = first_layer(module)
    layer.weight = nn.Parameter(layer.weight.detach() * -2)


def ema(module: nn.Module) -> None:
    from diffusers.training_utils import EMAModel

    average = EMAModel(module.parameters(), decay=0.5)
    copy_in_place(module)
    average.step(module.parameters())
    average.store(module.parameters())
    average.copy_to(module.parameters())


def ema_restored(module: nn.Module) -> None:
    from diffusers.training_utils import EMAModel

    average = EMAModel(module.parameters(), decay=0.5)
    average.store(module.parameters())
    copy_in_place(module)
    average.restore(module.parameters())


def to_channels_last(module: nn.Module) -> None:
    copy_in_place(module)
    for p in module.parameters():
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)


def dtype_round_trip(module: nn.Module) -> None:
    module.double().float()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * -2


def parametrized(module: nn.Module) -> None:
    parametrize.register_parametrization(first_layer(module), "weight", Doubled())


def pruned(module: nn.Module) -> None:
    layer = first_layer(module)
    generator = torch.Generator().manual_seed(2)
    mask = (torch.rand(layer.weight.shape, generator=generator) > 0.5).to(layer.weight)
    prune.custom_from_mask(layer, "weight", mask)


def buffers_written(module: nn.Module) -> None:
    """Write the values that buffers have: nothing changes but their versions."""
    for buffer in module.buffers():
        buffer.copy_(buffer.clone())


def gradients_wanted(module: nn.Module) -> None:
    module.requires_grad_(True)


def load_vae(vae: nn.Module) -> None:
    load_state_dict(vae)


def data_of_vae(vae: nn.Module) -> None:
    for p in vae.parameters():
        p.data = p.data * 1.1


def load_text_encoder(encoder: nn.Module) -> None:
    load_state_dict(encoder)
