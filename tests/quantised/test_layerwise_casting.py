"""diffusers' layerwise casting: weights stay in their storage type, and the compiled program casts
each at its use, as the hooks do."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import strop
from strop.api import optimize_module
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.frontend.clones import clone_structure
from strop.frontend.layerwise_casting import cast_of
from strop.ir.program import CallStep
from strop.options import Options
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.testing import assert_as_accurate_as_eager
from tests.diffusion.test_hoisting_rules import SecondIsSteady, bound_of
from tests.e2e import tiny
from tests.frontend.tracing import trace
from tests.quantised.stand_ins import ByFunctions, Net, quantised

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KEPT = ("norm",)  # in the type of the rest of the model


class Pixels(nn.Module):
    """One of each kind of layer that diffusers casts in pictures, and a norm that it does not."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(10, 8)
        self.inner, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x, kind):
        x = self.inner(x) + self.kinds(kind)[:, :, None, None]
        return self.out(F.silu(self.norm(self.up(x))).movedim(1, -1))


def cast(module, storage=E4M3, compute=BF16, kept=KEPT):
    module.eval().requires_grad_(False).to(compute)
    apply_layerwise_casting(module, storage, compute, skip_modules_pattern=kept)
    return module


def net_of(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def optimized(module, folder, **more):
    return strop.optimize(module, options=Options(cache_dir=str(folder), strict=True, **more))


def exact(module, *given):
    """What a module computes from the stored weights in fp64."""
    wide = copy.deepcopy(clone_structure(module))
    for part in wide.modules():
        vars(part).pop("forward", None)
    with torch.no_grad():
        return wide.double()(*(x.double() if x.is_floating_point() else x for x in given))


def agree(module, eager, exact_of, *given):
    with torch.no_grad():
        assert_as_accurate_as_eager(module(*given), eager(*given), exact(exact_of, *given))


def looks(module):
    return {name: (id(p), p.data_ptr(), p.dtype) for name, p in module.named_parameters()}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("storage", "compute"),
    [(E4M3, BF16), (E5M2, F16), (E4M3, F32), (BF16, F32), (F16, BF16), (BF16, BF16)],
    ids=str,
)
def test_it_is_compiled_as_accurate_as_eager_and_no_weight_moves(storage, compute, when, tmp_path):
    module, eager = net_of(), cast(net_of(), storage, compute)
    if when == "before":
        optimized(cast(module, storage, compute), tmp_path, check=True)
    else:
        optimized(module.eval().requires_grad_(False).to(compute), tmp_path, check=True)
        module(torch.randn(2, 64).to(compute))
        cast(module, storage, compute)
    before, untouched = looks(module), copy.deepcopy(dict(module.named_parameters()))
    assert {dtype for _, _, dtype in before.values()} == {storage, compute}
    for rows in (5, 9, 1):
        agree(module, eager, eager, torch.randn(rows, 64).to(compute))
    assert looks(module) == before
    assert all(torch.equal(p.float(), untouched[n].float()) for n, p in module.named_parameters())
    counters = module.forward.counters
    assert counters.fallbacks == {}
    assert counters.eager_calls == 0
    assert not counters.findings


@pytest.mark.parametrize(("storage", "compute"), [(E4M3, BF16), (E5M2, F32)], ids=str)
def test_all_kinds_of_layers(storage, compute, tmp_path):
    module, eager = (cast(net_of(Pixels), storage, compute) for _ in range(2))
    optimized(module, tmp_path, check=True)
    for sides in ((2, 8, 8), (1, 6, 10)):
        x = torch.randn(sides[0], 8, *sides[1:]).to(compute)
        agree(module, eager, eager, x, torch.arange(sides[0]))
    assert {p.dtype for p in module.parameters()} == {storage, compute}
    assert not module.forward.counters.eager_calls


def test_restore_gives_back_what_diffusers_does(tmp_path):
    module, twin = cast(net_of()), cast(net_of())
    forwards = {name: part.forward for name, part in module.named_modules() if name}
    optimized(module, tmp_path)
    x = torch.randn(4, 64).to(BF16)
    module(x)
    strop.restore(module)
    assert {name: part.forward for name, part in module.named_modules() if name} == forwards
    assert getattr(module.forward, "__func__", None) is Net.forward
    assert torch.equal(module(x), twin(x))
    assert {p.dtype for p in module.parameters()} == {E4M3, BF16}


def test_explain_says_what_is_cast(tmp_path):
    module = optimized(cast(net_of()), tmp_path)
    module(torch.randn(4, 64).to(BF16))
    report = strop.explain(module)
    line = "layerwise casting of 2 layers: torch.float8_e4m3fn cast to torch.bfloat16"
    assert line in str(report)
    assert report.calls == {"linear": 2}
    (graph,) = report.graphs
    biases = 2 * (64 + 128) // 2
    assert graph.decoded_bytes == 2 * (2 * 64 * 128 + biases)
    assert graph.most_decoded_bytes < 2 * (64 * 128 + 2 * biases)


# what a user does behind a call


def _written(module):
    module.a.weight.data.copy_(torch.randn(128, 64))


def _replaced(module):
    module.a.weight = nn.Parameter(torch.randn(128, 64).to(E4M3), requires_grad=False)


def _loaded(module):
    state = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    module.load_state_dict(state)


def _assigned(module):
    state = {name: torch.randn(p.shape).to(p.dtype) for name, p in module.named_parameters()}
    module.load_state_dict(state, assign=True)


def _moved(module):
    module.a.weight.data = module.a.weight.data.view(torch.uint8).flip(0).contiguous().view(E4M3)


def _no_longer(module):
    """As ``remove_hook`` leaves it, which fails in the middle, with weights that the user casts."""
    with pytest.raises(NotImplementedError):
        module.a._diffusers_hook.remove_hook("layerwise_casting")
    module.a.to(BF16)


@pytest.mark.parametrize("change", [_written, _replaced, _loaded, _assigned, _moved, _no_longer])
def test_what_is_changed_is_seen(change, tmp_path):
    module, twin = optimized(cast(net_of()), tmp_path), cast(net_of())
    x = torch.randn(4, 64).to(BF16)
    before = module(x)
    for net in (module, twin):
        torch.manual_seed(1)
        change(net)
    agree(module, twin, twin, x)
    assert (change is _no_longer) == torch.equal(before, module(x))
    assert not module.forward.counters.eager_calls


def test_another_compute_type_of_a_hook_is_seen(tmp_path):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.kinds = nn.Embedding(4, 8)

        def forward(self, x):
            return self.kinds(x)

    module = optimized(cast(net_of(Wide)), tmp_path)
    assert module(torch.arange(3)).dtype == BF16
    module.kinds._diffusers_hook.get_hook("layerwise_casting").compute_dtype = F32
    assert module(torch.arange(3)).dtype == F32
    assert not module.forward.counters.eager_calls
    assert strop.explain(module).num_graphs == 2


def _to(module):
    module.to(BF16)


def _assigned_wide(module):
    state = {name: torch.randn(p.shape).to(BF16) for name, p in module.named_parameters()}
    module.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [_to, _assigned_wide])
def test_eager_rounds_weights_that_are_not_in_their_storage_type(change, tmp_path):
    """diffusers computes with such a weight once, in full, and stores it rounded behind that."""
    module, twin = cast(net_of()), cast(net_of())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    x = torch.randn(4, 64).to(BF16)
    module(x)
    for net in (module, twin):
        torch.manual_seed(1)
        change(net)
    assert torch.equal(module(x), twin(x))
    (reason,) = module.forward.counters.fallbacks
    assert reason.startswith("layerwise casting: weight is torch.bfloat16, and torch.float8_e4m3fn")
    agree(module, twin, twin, x)
    assert module.forward.counters.eager_calls == 1
    assert module.a.weight.dtype == E4M3


def test_a_call_in_eager_between_two_compiled_ones(tmp_path):
    module, twin = cast(net_of()), cast(net_of())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    x = torch.randn(4, 64).to(BF16)
    module(x)
    module.norm.requires_grad_(True)
    assert torch.equal(module(x), twin(x))  # gradients: diffusers' hooks run
    module.norm.requires_grad_(False)
    agree(module, twin, twin, x)
    assert module.forward.counters.eager_calls == 1


# what is refused


def test_a_module_that_is_cast_as_one_runs_in_eager_with_a_reason(tmp_path):
    module = net_of().eval().requires_grad_(False).to(BF16)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    apply_layerwise_casting(module, E4M3, BF16, skip_modules_pattern=None)
    x = torch.randn(4, 64).to(BF16)
    for _ in range(2):
        module(x)
    (reason,) = strop.explain(module).components[0].fallbacks
    assert reason.startswith("layerwise casting of the whole module at once")
    assert strop.explain(module).components[0].num_rebinds <= 1


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x) * 2


def test_a_block_that_is_cast_as_one(tmp_path):
    module, twin = (net_of(Outer).eval().requires_grad_(False).to(BF16) for _ in range(2))
    for net in (module, twin):
        apply_layerwise_casting_hook(net.net, E4M3, BF16, non_blocking=False)
    optimized(module, tmp_path)
    agree(module, twin, twin, torch.randn(4, 64).to(BF16))
    assert module.net.norm.weight.dtype == E4M3
    assert "layerwise casting of 1 layer:" in str(strop.explain(module))


def test_layers_cast_within_each_other_run_in_eager_with_a_reason(tmp_path):
    module = cast(net_of(Outer))
    apply_layerwise_casting_hook(module.net, E5M2, BF16, non_blocking=False)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    module(torch.randn(4, 64).to(BF16))
    (reason,) = module.forward.counters.fallbacks
    assert reason.startswith("layerwise casting of a layer within one that is cast (in net, Net)")


def test_quantised_weights_run_in_eager_with_a_reason(tmp_path):
    module = quantised(ByFunctions, net_of())
    for part in (module.a, module.b):
        part.bias = None
        apply_layerwise_casting_hook(part, F32, F32, non_blocking=False)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    module(torch.randn(4, 64))
    (reason,) = module.forward.counters.fallbacks
    assert reason.startswith("layerwise casting: weight is quantised")


class Counts(nn.Module):
    """A layer that writes to a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_writes_to_what_is_cast_run_in_eager_with_a_reason(tmp_path):
    module = nn.Sequential(Counts(), nn.Identity()).eval()
    apply_layerwise_casting_hook(module[0], BF16, F32, non_blocking=False)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    x = torch.ones(2)
    assert [module(x)[0].item() for _ in range(3)] == [1, 2, 3]
    (reason,) = module.forward.counters.fallbacks
    assert "a Counts under layerwise casting writes to its weights" in reason


def test_hooks_beside_it_run_in_eager_with_a_reason(tmp_path):
    module = cast(net_of())
    apply_group_offloading(module, torch.device("cpu"), offload_type="leaf_level")
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    module(torch.randn(4, 64).to(BF16))
    (reason,) = module.forward.counters.fallbacks
    assert "group offloading is on" in reason


def test_a_copy_whose_hooks_are_the_originals_is_as_in_eager(tmp_path):
    """copy.deepcopy leaves hooks of diffusers with the forward of the original layer."""
    module = copy.deepcopy(cast(net_of()))
    assert cast_of(module.a) is None
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    with pytest.raises(RuntimeError):
        module(torch.randn(4, 64).to(BF16))  # as without us


# beside other features


def _adapted(module, **more):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["a", "b"], init_lora_weights=False)
    inject_adapter_in_model(config, module)
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize("first", ["casting", "adapters"])
def test_adapters_are_computed_as_peft_does(first, tmp_path):
    def make():
        torch.manual_seed(0)
        module, kept = Net(), (*KEPT, "lora_A", "lora_B")
        if first == "casting":
            return _with_bf16(_adapted(cast(module)))
        return cast(_adapted(module), kept=kept)

    def _with_bf16(module):
        for name, part in module.named_modules():
            if "lora_" in name:
                part.to(BF16)
        return module

    module, twin = make(), make()
    optimized(module, tmp_path)
    x = torch.randn(4, 64).to(BF16)
    for scale in (2.0, 0.5):
        for net in (module, twin):
            net.a.scaling["default"] = scale
        with torch.no_grad():
            torch.testing.assert_close(module(x), twin(x), rtol=2e-2, atol=2e-2)
    assert not module.forward.counters.eager_calls
    why = "layerwise casting keeps its weight in another type"
    assert f"adapters of 2 layers are traced as they are: {why}" in str(strop.explain(module))


def test_adapters_that_are_cast_too(tmp_path):
    """Their layer then keeps its input as it is, which a second hook of diffusers sees to."""
    module, twin = (cast(_adapted(net_of())) for _ in range(2))
    assert module.a.lora_A["default"].weight.dtype == E4M3
    optimized(module, tmp_path)
    x = torch.randn(4, 64).to(BF16)
    with torch.no_grad():
        torch.testing.assert_close(module(x), twin(x), rtol=2e-2, atol=2e-2)
    assert module.a.cast_input_dtype_enabled
    assert not module.forward.counters.eager_calls


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Net() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_repeated_blocks_are_traced_once(tmp_path):
    module, twin = cast(net_of(Stack)), cast(net_of(Stack))
    optimized(module, tmp_path)
    agree(module, twin, twin, torch.randn(4, 64).to(BF16))
    assert strop.explain(module).graphs[0].num_copied_blocks == 2


def test_blocks_of_other_compute_types_are_no_copies(tmp_path):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Embedding(4, 8), nn.Identity()) for _ in range(4)
            )

        def forward(self, x):
            return [block(x) for block in self.blocks]

    module = cast(net_of(Tables))
    module.blocks[3][0]._diffusers_hook.get_hook("layerwise_casting").compute_dtype = F32
    optimized(module, tmp_path)
    assert [y.dtype for y in module(torch.arange(3))] == [BF16, BF16, BF16, F32]


def test_tied_weights(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.words(x))

    module, twin = (cast(net_of(Tied)) for _ in range(2))
    optimized(module, tmp_path)
    agree(module, twin, twin, torch.arange(5))
    module.words.weight.data.copy_(torch.ones(16, 8))
    twin.words.weight.data.copy_(torch.ones(16, 8))
    agree(module, twin, twin, torch.arange(5))


def test_another_process_finds_the_graph_of_its_types_alone(tmp_path):
    first = optimized(cast(net_of()), tmp_path)
    first(torch.ones(2, 64, dtype=BF16))
    again, twin = optimized(cast(net_of(seed=1)), tmp_path), cast(net_of(seed=1))
    agree(again, twin, twin, torch.ones(2, 64, dtype=BF16))
    assert [v.from_disk for v in again.forward.variants.all] == [True]
    plain = net_of().eval().requires_grad_(False).to(BF16)
    optimized(plain, tmp_path)(torch.ones(2, 64, dtype=BF16))
    assert [v.from_disk for v in plain.forward.variants.all] == [False]


def test_training_beside_it_is_left_to_torch(tmp_path):
    module, twin = cast(net_of()), cast(net_of())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)), train=True)
    x = torch.randn(5, 64).to(BF16)
    for net in (module, twin):
        net.norm.requires_grad_(True)
        net(x).square().sum().backward()
    torch.testing.assert_close(module.norm.weight.grad, twin.norm.weight.grad, rtol=2e-2, atol=0.5)


class Attending(nn.Module):
    """Of x, and of a prompt p that stays the same."""

    def __init__(self):
        super().__init__()
        self.own, self.key, self.out = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, p):
        return self.out(F.silu(self.own(x)) * self.key(p))


@pytest.mark.parametrize(("storage", "compute"), [(E4M3, BF16), (BF16, F32), (F16, BF16)], ids=str)
def test_a_loop_keeps_no_weight_in_full(storage, compute):
    module, loop = cast(net_of(Attending), storage, compute), DenoiseLoop()
    twin = cast(net_of(Attending), storage, compute)
    how = {"adapter": SecondIsSteady(), "loop": loop}
    dispatcher = optimize_module(module, tiny.options(hoist=True), **how)
    x, p = (torch.randn(6, 64).to(compute) for _ in range(2))
    loop.begin()
    for _ in range(3):
        agree(module, twin, twin, x, p)
        x = x + 1
    loop.end()
    bound, hoisted = bound_of(dispatcher), dispatcher.counters.hoisted
    assert (hoisted.num_runs, hoisted.num_reuses) == (1, 2)
    kept = [bound.program.buffers[number].shape for number in bound.hoisted.kept]
    assert [str(size) for shape in kept for size in shape] == ["b", "64"]  # of the prompt


def test_working_memory_holds_two_weights_in_full_at_most():
    count, width = 8, 128
    stack = cast(nn.Sequential(*(nn.Linear(width, width) for _ in range(count))))
    dispatcher = optimize_module(stack, tiny.options())
    stack(torch.randn(4, width).to(BF16))
    in_full, activations = width * width * 2, 4 * width * 2
    arena_bytes = bound_of(dispatcher).plan.memory.arena_bytes
    assert in_full <= arena_bytes <= 2 * in_full + 8 * activations


def test_a_gpu_multiplies_one_row_by_the_stored_weight():
    net = clone_structure(cast(nn.Sequential(nn.Linear(512, 256), nn.SiLU())))
    traced = trace(net, "b 512", dtype=BF16, b=1)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", Options()).program
    states = [spec.dtype for spec in program.inputs if spec.is_state]
    assert states == [torch.uint8, torch.uint8]  # as kernels load it
    (call,) = (p for p, step in enumerate(program.steps) if isinstance(step, CallStep))
    assert program.at({"b": 1})[call] is None
    assert program.at({"b": 56})[call] is not None


def _flux():
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    given = {
        "hidden_states": torch.randn(1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 3, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    return model, given


def _unet():
    given = {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(5),
        "encoder_hidden_states": torch.randn(1, 7, tiny.PROMPT_DIM),
    }
    return tiny.pipeline().unet, given


@pytest.mark.parametrize("make", [_flux, _unet], ids=["flux", "unet"])
def test_models_of_diffusers(make, tmp_path):
    """Their code asks for the model's ``dtype``, which is the one that layers compute in."""
    (model, given), (twin, _) = make(), make()
    for net in (model, twin):
        net.eval().requires_grad_(False).to(BF16)
        net.enable_layerwise_casting(storage_dtype=E4M3, compute_dtype=BF16)
    given = {n: x.to(BF16) if x.is_floating_point() else x for n, x in given.items()}
    optimized(model, tmp_path, check=True)
    found, wanted = model(**given).sample, twin(**given).sample
    assert found.dtype == wanted.dtype == BF16
    error = (found - wanted).float().norm() / wanted.float().norm()
    assert error < 0.02  # a few roundings to bf16 in another order
    counters = model.forward.counters
    assert counters.eager_calls == 0
    assert counters.fallbacks == {}
    assert not counters.findings
    assert sum(p.dtype == E4M3 for p in model.parameters()) > 20


def test_it_can_be_pickled_no_more_than_without_us(tmp_path):
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(cast(net_of()))  # hooks are functions within functions
    module = optimized(cast(net_of()), tmp_path)
    module(torch.ones(2, 64, dtype=BF16))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(module)
    assert not module.forward.counters.eager_calls
