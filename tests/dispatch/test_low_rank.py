"""Adapters beside the weights: little memory, one graph for all of a rank, and eager's values."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch import Tensor, nn

import strop
from strop import passes
from strop.dispatch import adapted_weights
from strop.dispatch.derived_inputs import EFFECTIVE, LOW_RANK
from strop.dispatch.low_rank_weights import LowRankWeights
from strop.errors import CaptureError, OptionError, ShapeError, UnsupportedError
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.dispatch.test_adapters import CHANGES, assert_as_eager
from tests.e2e import tiny

TARGETS = ("conv", "q", "k", "v", "out")


class Picture(nn.Module):
    """A convolution and an attention over its pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, width, 3, stride=2, padding=1)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2)
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / 4).softmax(-1)
        return x + self.out(weights @ self.v(x))


class AsRows(Picture):
    """One that mixes the rows of its batch with its pixels."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2)
        return self.out(x.flatten(0, 1))


def add(module: Any, name: str = "a", rank: int = 2, seed: int = 1, **more: Any) -> None:
    torch.manual_seed(seed)
    how = {"lora_alpha": 3, "target_modules": [*TARGETS]} | more
    config = LoraConfig(r=rank, init_lora_weights=False, **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        inject_adapter_in_model(config, module, adapter_name=name)
    module.eval().requires_grad_(False)


def layers(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "lora_A")]


def activate(module: nn.Module, *names: str) -> None:
    for layer in layers(module):
        layer.set_adapter([*names])
    module.requires_grad_(False)


def pictures(
    tmp_path: Path, *, dtype: torch.dtype = torch.float32, kind: type[Picture] = Picture, **how: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = kind().to(dtype).eval().requires_grad_(False)
    options = {"lora": "unmerged", "strict": True} | how
    fast = strop.optimize(
        copy.deepcopy(eager), options=tiny.options(cache_dir=str(tmp_path), **options)
    )
    return eager, fast


def given(rows: int = 2, size: int = 8) -> Tensor:
    return torch.linspace(-1, 1, rows * 4 * size * size).reshape(rows, 4, size, size)


def assert_close(eager: Any, fast: Any, x: Tensor | None = None) -> None:
    x = given() if x is None else x
    torch.testing.assert_close(fast(x), eager(x), rtol=1e-4, atol=1e-5)


def test_one_more_graph_for_all_that_users_do(tmp_path: Path) -> None:
    eager = tiny.unet()
    options = tiny.options(cache_dir=str(tmp_path), lora="unmerged", strict=True)
    fast: Any = strop.optimize(copy.deepcopy(eager), options=options)
    assert_as_eager(eager, fast)
    for name, change in CHANGES.items():
        for unet in (eager, fast):
            change(unet)
        assert_as_eager(eager, fast)
        assert fast.forward.variants.num_captures == 2, name
    assert fast.forward.counters.eager_calls == 0


def test_the_memory_is_that_of_the_factors(tmp_path: Path) -> None:
    _, fast = pictures(tmp_path)
    add(fast)
    fast(given())
    (row,) = strop.explain(fast).components
    assert row.derived_of(EFFECTIVE) is None
    found, weights = row.derived_of(LOW_RANK), fast.forward.state.effective.low_rank
    assert found is not None
    assert (found.count, weights.rank) == (len(TARGETS), 16)
    linears = 4 * 16 * (16 + 16)
    assert weights.size_bytes == 4 * (linears + 16 * (4 * 9 + 16))
    assert found.size_bytes == weights.size_bytes + weights.watch_bytes
    products = 2 + 1 + 3 + 2  # A of q, k and v is one product
    assert f"up to rank 16, {products} more products a call" in found.detail
    assert "factors of adapters beside the weights: 5 layers, " in str(strop.explain(fast))
    assert "(1.60 a layer) " not in str(strop.explain(fast))
    assert "lora='unmerged'" in str(strop.explain(fast))


def test_the_rank_grows_by_powers_of_two(tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path)
    for name, rank, most in (("a", 2, 16), ("b", 16, 16), ("c", 17, 32), ("d", 1, 32)):
        for module in (eager, fast):
            add(module, name, rank)
            activate(module, name)
        assert_close(eager, fast)
        assert fast.forward.state.effective.low_rank.rank == most
    assert fast.forward.variants.num_captures == 2
    for module in (eager, fast):
        activate(module, "a", "b", "d")  # of rank 19 together
    assert_close(eager, fast)
    assert fast.forward.variants.num_captures == 2


def test_the_rank_may_be_said_before(tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path, lora_max_rank=40)
    for name, rank in (("a", 2), ("b", 40), ("c", 22)):
        for module in (eager, fast):
            add(module, name, rank)
            activate(module, name) if name != "c" else activate(module, "b", "a", "c")
        assert_close(eager, fast)
        assert fast.forward.state.effective.low_rank.rank == 64
    assert fast.forward.variants.num_captures == 1


def test_parameters_stay_and_restore_undoes(tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path)
    for module in (eager, fast):
        add(module)
    before = {
        name: (value, value.clone()) for name, value in fast.state_dict(keep_vars=True).items()
    }
    assert_close(eager, fast)
    strop.restore(fast)
    after = fast.state_dict(keep_vars=True)
    assert before.keys() == after.keys() == eager.state_dict().keys()
    assert all(after[name] is value for name, (value, _) in before.items())
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert torch.equal(fast(given()), eager(given()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_no_further_off_than_eagers(dtype: torch.dtype, tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path, dtype=dtype)
    for module in (eager, fast):
        add(module)
        add(module, "b", rank=5, seed=2)
        activate(module, "a", "b")
        for layer in layers(module):
            layer.scaling["b"] = -0.37
    exact, x = copy.deepcopy(eager).double(), given(3).to(dtype)
    assert_as_accurate_as_eager(fast(x), eager(x), exact(x.double()))


def test_a_scale_is_rounded_once_with_its_factor() -> None:
    module: Any = Picture().half()
    add(module)
    add(module, "b", rank=5, seed=2)
    activate(module, "b", "a")
    for layer in layers(module):
        layer.scaling["b"] = 0.3
    weights = LowRankWeights()
    weights.scan(layers(module))
    weights.refresh(0.7)
    for table, layer in zip(weights.tables.values(), layers(module), strict=True):
        down, up = table["low_rank_a"], table["low_rank_b"]
        first_a, first_b = (layer.lora_A[name].weight for name in ("a", "b"))
        last_a, last_b = (layer.lora_B[name].weight for name in ("a", "b"))
        assert torch.equal(down[:7], torch.cat([first_b, first_a]))
        scaled = [last_b.float() * (0.3 * 0.7), last_a.float() * (1.5 * 0.7)]
        assert torch.equal(up[:, :7], torch.cat(scaled, 1).half())
        assert not down[7:].any()
        assert not up[:, 7:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_where_no_kernel_reads_it_first(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(passes, "ONLY_ON", {**passes.ONLY_ON, "low_rank_add": device})
        eager, fast = pictures(tmp_path / device, dtype=dtype)
        for module in (eager, fast):
            add(module)
        exact, x = copy.deepcopy(eager).double(), given(3).to(dtype)
        assert_as_accurate_as_eager(fast(x), eager(x), exact(x.double()))
        (variant,) = fast.forward.variants.all
        added = [step for step in variant.program.call_steps if step.op == "linear_add"]
        assert len(added) == (3 if device == "cpu" else 0)  # queries, keys and values


def test_a_hot_swap_writes_scales_in_place(tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path)
    for module in (eager, fast):
        add(module)
        prepare_model_for_compiled_hotswap(module, target_rank=8)
        module.requires_grad_(False)
    assert_close(eager, fast)
    for scale in (0.3, -2.0):
        for module in (eager, fast):
            for layer in layers(module):
                layer.scaling["a"].fill_(scale)
        assert_close(eager, fast)
    assert fast.forward.variants.num_captures == 1


def test_other_kinds_of_adapters_stay_as_they_are(tmp_path: Path) -> None:
    eager, fast = pictures(tmp_path)
    for module in (eager, fast):
        add(module, use_dora=True)
    assert_close(eager, fast)
    assert not len(fast.forward.state.effective.low_rank)


def test_a_window_that_is_not_the_adapters(tmp_path: Path) -> None:
    """Tilings set the padding; an adapter that comes later has zeros around."""
    for lora in ("merged", "unmerged"):
        eager, fast = pictures(tmp_path, lora=lora)
        for module in (eager, fast):
            module.conv.padding_mode = "circular"
            add(module)
        assert_close(eager, fast)
        assert len(fast.forward.state.effective) == len(TARGETS) - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_goes_on_with_its_graphs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager: Any = Picture(64).cuda().half().eval().requires_grad_(False)
    options = tiny.options(cache_dir=str(tmp_path), lora="unmerged", strict=True)
    fast: Any = strop.optimize(copy.deepcopy(eager), options=options)
    for module in (eager, fast):
        add(module, rank=4)
        add(module, "b", rank=7, seed=2)
    exact, x = copy.deepcopy(eager).double(), given(4, 32).cuda().half()
    for _ in range(3):
        fast(x)
    for names, scale in ((["a"], 1.0), (["b", "a"], 0.5), (["b"], -2.0)):
        for module in (eager, fast, exact):
            activate(module, *names)
            for layer in layers(module):
                layer.scaling["a"] = scale
        replays = fast.forward.counters.replays
        assert_as_accurate_as_eager(fast(x), eager(x), exact(x.double()))
        assert fast.forward.counters.replays == replays + 1
    assert fast.forward.variants.num_captures == 1
    for names in (["a", "b"], ["b", None], [None, "a"], ["a", "a"]):
        with strop.lora_rows(fast, names):
            found = fast(x)
        halves: list[str | None] = [*names, *names]
        wanted, ideal = (
            by_row(module, x.to(kind), halves, [1.0] * 4)
            for module, kind in ((eager, torch.float16), (exact, torch.float64))
        )
        assert_as_accurate_as_eager(found, wanted, ideal)
    assert fast.forward.variants.num_captures == 2


# which mode


def test_a_short_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, fast = pictures(tmp_path, lora="auto")
    needed = sum(p.nbytes for n, p in eager.named_parameters() if "weight" in n)
    free = adapted_weights.RESERVE_BYTES + needed
    monkeypatch.setattr(adapted_weights, "free_bytes", lambda device: free)
    for module in (eager, fast):
        add(module)
    assert_close(eager, fast)
    weights = fast.forward.state.effective
    assert (len(weights.merged), len(weights.low_rank)) == (5, 0)
    free = 0  # what has been made stays
    for module in (eager, fast):
        add(module, "b")
        activate(module, "b")
    assert_close(eager, fast)
    assert len(weights.merged) == 5

    eager, fast = pictures(tmp_path, lora="auto")
    free = adapted_weights.RESERVE_BYTES + needed - 1
    for module in (eager, fast):
        add(module)
    assert_close(eager, fast)
    weights = fast.forward.state.effective
    assert (len(weights.merged), len(weights.low_rank)) == (0, 5)
    assert "2.15 GB in reserve, and 2.15 GB were free" in str(strop.explain(fast))


def test_nobody_asks_a_cpu() -> None:
    assert adapted_weights.free_bytes(torch.device("cpu")) is None


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="lora='both': expected one of auto, merged, unmerged"):
        Options(lora="both")


def test_what_is_hoisted_sees_new_factors() -> None:
    """Version counters tell it."""
    module: Any = Picture()
    add(module)
    weights = LowRankWeights()
    weights.scan(layers(module))
    held = [
        t for table in weights.tables.values() for t in (table["low_rank_a"], table["low_rank_b"])
    ]
    before = [t._version for t in held]
    assert weights.refresh(1.0)
    before = [t._version for t in held]
    assert weights.refresh(0.5)
    assert all(t._version > version for t, version in zip(held, before, strict=True))
    assert not weights.refresh(0.5)


# rows


def three(tmp_path: Path, **how: Any) -> tuple[Any, Any]:
    """Two of another rank, and one of which a layer has none."""
    eager, fast = pictures(tmp_path, **how)
    for module in (eager, fast):
        add(module)
        add(module, "b", rank=5, seed=2)
        add(module, "c", rank=3, seed=3, target_modules=["q", "conv"])
        activate(module, "a")
    return eager, fast


def by_row(eager: Any, x: Tensor, names: list[str | None], scales: list[float]) -> Tensor:
    """What eager gives for each row alone."""
    results = []
    for row, name, scale in zip(x.split(1), names, scales, strict=True):
        alone = copy.deepcopy(eager)
        for layer in layers(alone):
            if name is None:
                layer.enable_adapters(False)
                continue
            layer.set_adapter([name])
            if name in layer.scaling:
                layer.scaling[name] *= scale
        results.append(alone(row))
    return torch.cat(results)


def test_rows_take_adapters_of_their_own(tmp_path: Path) -> None:
    eager, fast = three(tmp_path)
    x = given(4)
    assert_close(eager, fast, x)
    cases: list[tuple[list[str | None], list[float] | None]] = [
        (["a", "b", None, "c"], None),
        (["c", "c", "a", None], [0.5, 2.0, -1.0, 3.0]),
        ([None, "b"], None),  # again for the second half
    ]
    captures = None
    for names, scales in cases:
        with strop.lora_rows(fast, names, scales):
            found = fast(x)
        times = 4 // len(names)
        wanted = by_row(eager, x, names * times, (scales or [1.0] * len(names)) * times)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        captures = captures or fast.forward.variants.num_captures
        rebinds = fast.forward.counters.rebinds
    with strop.lora_rows(fast, ["b", "a"]):  # any number of rows
        x = given(6)
        wanted = by_row(eager, x, ["b", "a"] * 3, [1.0] * 6)
        torch.testing.assert_close(fast(x), wanted, rtol=1e-4, atol=1e-5)
    assert fast.forward.variants.num_captures == captures
    assert fast.forward.counters.rebinds == rebinds  # of one context and the next
    assert_close(eager, fast)
    assert fast.forward.variants.num_captures == captures


def test_rows_where_adapters_are_merged_otherwise(tmp_path: Path) -> None:
    eager, fast = three(tmp_path, lora="merged")
    x = given()
    assert_close(eager, fast, x)
    with strop.lora_rows(fast, ["b", None]):
        wanted = by_row(eager, x, ["b", None], [1.0, 1.0])
        torch.testing.assert_close(fast(x), wanted, rtol=1e-4, atol=1e-5)
        assert not len(fast.forward.state.effective.merged)
    assert_close(eager, fast, x)
    assert len(fast.forward.state.effective.merged) == 5


def test_rows_are_counted(tmp_path: Path) -> None:
    _, fast = three(tmp_path)
    with strop.lora_rows(fast, ["a", "b"]):
        for rows in (1, 3, 130):
            with pytest.raises(ShapeError, match=f"for 2 rows, but a call has {rows}"):
                fast(given(rows))


def test_rows_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    _, fast = three(tmp_path, kind=AsRows, strict=False)
    with strop.lora_rows(fast, ["a", "b"]), pytest.raises(CaptureError, match="are no pictures"):
        fast(given())
    fast(given())


def test_what_rows_cannot_have_is_refused(tmp_path: Path) -> None:
    _, fast = three(tmp_path)
    for names, scales, message in (
        (["z", None], None, "no optimised module has an adapter z; there are a, b, c"),
        ("ab", None, "takes a list of names"),
        (["a"], [1.0, 2.0], "1 name and 2 scales"),
        ([], None, "0 names"),
    ):
        with pytest.raises(OptionError, match=message), strop.lora_rows(fast, names, scales):
            pass
    with (
        strop.lora_rows(fast, ["a"]),
        pytest.raises(OptionError, match="nested"),
        strop.lora_rows(fast, ["b"]),
    ):
        pass
    assert fast.forward.state.effective.rows is None
    add(fast, "d", use_dora=True)
    with pytest.raises(UnsupportedError, match="no plain LoRA"), strop.lora_rows(fast, ["a"]):
        pass
    assert fast.forward.state.effective.rows is None


class Turning(Picture):
    """A user's model that reads its adapters' scales while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.q.scaling)  # type: ignore[arg-type]


def test_a_model_that_acts_on_its_adapters_has_no_rows(tmp_path: Path) -> None:
    _, fast = pictures(tmp_path, kind=Turning, strict=False)
    add(fast)
    with pytest.raises(UnsupportedError, match="acts on them"), strop.lora_rows(fast, ["a"]):
        fast(given())
    fast(given())


def test_eager_would_not_know_of_rows(tmp_path: Path) -> None:
    _, fast = three(tmp_path, strict=False)
    fast.train()
    with (
        strop.lora_rows(fast, ["a"]),
        torch.enable_grad(),
        pytest.raises(UnsupportedError, match="eager knows no strop"),
    ):
        fast(given().requires_grad_())


def drawn(pipe: Any) -> Tensor:
    """Latents of two pictures, under guidance."""
    noise = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)
    prompt = torch.linspace(1, -1, 2 * 5 * tiny.PROMPT_DIM).reshape(2, 5, tiny.PROMPT_DIM)
    result: Tensor = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=-prompt,
        latents=noise,
        guidance_scale=4.0,
        num_inference_steps=4,
        output_type="latent",
    ).images
    return result


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_pictures_of_a_pipeline_have_adapters_of_their_own(tmp_path: Path) -> None:
    """The embeddings of all timesteps are made at once, for as many rows more."""
    pipes = [tiny.pipeline() for _ in range(2)]
    for pipe in pipes:
        for name, rank, seed in (("a", 2, 1), ("b", 5, 2)):
            torch.manual_seed(seed)
            targets = ["to_q", "to_out.0", "time_emb_proj", "conv1"]
            how: Any = {"init_lora_weights": False, "target_modules": targets}
            pipe.unet.add_adapter(LoraConfig(r=rank, **how), name)
    eager, fast = pipes
    wanted = {}
    for name in ("a", "b"):
        eager.unet.set_adapters([name])
        wanted[name] = drawn(eager)
    eager.unet.disable_adapters()
    wanted[""] = drawn(eager)
    options = tiny.options(cache_dir=str(tmp_path), strict=True)
    strop.optimize(fast, options=options)
    for names in (("a", "b"), ("b", ""), ("", "a")):
        with strop.lora_rows(fast, [name or None for name in names]):
            found = drawn(fast)
        rows = torch.stack([wanted[name][row] for row, name in enumerate(names)])
        torch.testing.assert_close(found, rows, rtol=1e-3, atol=1e-4)
    (row,) = (c for c in strop.explain(fast).components if c.name == "unet")
    assert row.num_captures == 1
    found = row.derived_of(LOW_RANK)
    assert found is not None
    assert found.count > 10
