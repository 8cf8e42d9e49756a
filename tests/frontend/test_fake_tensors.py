import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from strop.frontend.fake_tensors import fake_memory, fake_view, fake_weights
from strop.frontend.functional import memory_of
from strop.frontend.module_tensors import named_state


def state_of_all_kinds():
    module = nn.Module()
    module.plain = nn.Parameter(torch.randn(3, 4))
    module.frozen = nn.Parameter(torch.randn(5, dtype=torch.float16), requires_grad=False)
    module.register_buffer("count", torch.tensor(3))
    module.register_buffer("empty", torch.randn(0, 4))
    module.register_buffer("turned", torch.randn(4, 3).t())
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    module.register_buffer("channels_last", last)
    whole = torch.randn(8, 3)
    module.register_buffer("first", whole[:4])
    module.register_buffer("second", whole[4:])
    module.register_buffer("part", torch.randn(9)[2:5])
    module.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
    return named_state(module)


@pytest.fixture
def pairs():
    state, mode = state_of_all_kinds(), FakeTensorMode()
    fakes = fake_weights(mode, state)
    usual = {n: mode.from_tensor(t.detach(), static_shapes=True) for n, t in state.items()}
    assert fakes.keys() == state.keys()
    return [(state[name], fakes[name], usual[name]) for name in state]


def test_it_is_as_torch_makes_it(pairs):
    for real, fake, usual in pairs:
        assert fake.requires_grad == real.requires_grad
        for one in (real, usual):
            assert (fake.shape, fake.stride(), fake.dtype) == (one.shape, one.stride(), one.dtype)
            assert fake.storage_offset() == one.storage_offset()
            assert fake.device == one.device
            assert fake.is_leaf == one.is_leaf
            assert fake.is_conj() == one.is_conj()
        assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()
        assert type(fake) is type(usual)
        assert fake.fake_mode is usual.fake_mode


def test_what_shares_memory_does_so_in_a_trace(pairs):
    def groups(tensors):
        found = {}
        for place, tensor in enumerate(tensors):
            found.setdefault(memory_of(tensor), []).append(place)
        return sorted(found.values())

    reals, fakes, _ = zip(*pairs, strict=True)
    assert groups(fakes) == groups(reals)
    assert any(len(group) == 2 for group in groups(reals))


def test_memory_for_sizes_that_are_sums_asks_nothing() -> None:
    """A guard that a product of such sizes is no less than 0 would keep patterns from matching."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(6, 4, 8, 9))
    with mode:
        y = F.conv2d(x[:, :4], torch.empty(5, 4, 3, 3))
    before = list(env.guards)
    memory = fake_memory(mode, y.shape, y.dtype)
    found = fake_view(y, memory, y.shape, y.stride(), 0)
    assert (found.shape, found.stride()) == (y.shape, y.stride())
    assert env.guards == before
