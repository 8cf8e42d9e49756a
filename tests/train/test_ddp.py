"""Two processes under DistributedDataParallel train as one does that accumulates their batches."""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import strop
from strop import Options, train
from strop.api import dispatchers_of
from strop.dispatch.dynamo import AOT_LOG
from strop.errors import UnsupportedError
from tests.train import interpreted, taped
from tests.train.compiled import Args, Resnet, options, roles

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
PAIR = ["backward", "forward"]
WORLD, STEPS, LR = 2, 3, 1e-2
PATIENCE_S = 240  # one who hangs fails the test


# ---- the processes -----------------------------------------------------------------------------


def _work(rank: int, meeting: str, end: Connection) -> None:
    """A process: runs what it is handed until it is killed. Whatever is raised ends it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE_S / 2),
    )
    while True:
        asked = end.recv()
        torch._dynamo.reset()
        answer = io.BytesIO()
        torch.save(asked(rank), answer)
        end.send_bytes(answer.getvalue())


class Ranks:
    """Two processes that have met. Those that have failed are not asked again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.meetings = folder, 0
        self.start()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What ``function(rank)`` gives in each process."""
        if not self.processes:
            self.start()
        for end in self.ends:
            end.send(function)
        deadline, found = time.monotonic() + PATIENCE_S, []
        for rank, end in enumerate(self.ends):
            if not end.poll(max(deadline - time.monotonic(), 0)):
                self.stop()
                pytest.fail(f"process {rank} hangs")
            try:
                answer = end.recv_bytes()
            except EOFError:
                self.stop()
                pytest.fail(f"process {rank} has died; see what it printed")
            found.append(torch.load(io.BytesIO(answer), weights_only=True))
        return found

    def start(self) -> None:
        spawn = torch.multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.ends: list[Connection] = []
        self.meetings += 1
        meeting = str(self.folder / f"meeting{self.meetings}")
        for rank in range(WORLD):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(rank, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(mine)

    def stop(self) -> None:
        for process, end in zip(self.processes, self.ends, strict=True):
            process.kill()
            process.join()
            end.close()
        self.processes, self.ends = [], []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("meetings"))
    assert found.run(int) == list(range(WORLD))
    yield found
    found.stop()


# ---- trainings, in the processes ---------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A training. ``parts``: batches of each process for a step; all but the last are not averaged
    by themselves. ``compiled_step``: whether ``compile_step`` does what a loop does else."""

    optimizer: Callable[..., torch.optim.Optimizer] = train.FusedAdamW
    arguments: dict[str, Any] = field(default_factory=dict)
    parts: int = 1
    views: bool = False
    compiled_step: bool = False
    by_torch: bool = False  # torch.compile(backend="strop")
    wrapped_first: bool = False


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Resnet().train()


def compiled(case: Case, module: nn.Module, how: Options) -> Any:
    if not case.by_torch:
        return strop.optimize(module, train=True, options=how)
    return torch.compile(
        module, backend="strop", options={"cache_dir": how.cache_dir, "strict": how.strict}
    )


def wrapped(case: Case, module: nn.Module, how: Options) -> tuple[DistributedDataParallel, Any]:
    """And what is called, which may be around it."""
    wrap = partial(DistributedDataParallel, gradient_as_bucket_view=case.views)
    if not case.wrapped_first:
        found = wrap(compiled(case, module, how))
        return found, found
    found = wrap(module)
    if case.by_torch:
        return found, compiled(case, found, how)
    assert compiled(case, found, how) is found
    return found, found


def batch(step: int, part: int, rank: int) -> Args:
    source = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(2, 16, 8, 6, generator=source), torch.randn(2, 24, generator=source)


def loss_of(module: Any, *args: Tensor) -> Tensor:
    loss: Tensor = module(*args).square().mean()
    return loss


def alone(case: Case, module: Any) -> torch.optim.Optimizer:
    """In one process: the mean of the losses of all batches, one after the other."""
    optimizer = case.optimizer(module.parameters(), lr=LR, **case.arguments)
    for step in range(STEPS):
        for part in range(case.parts):
            for rank in range(WORLD):
                (loss_of(module, *batch(step, part, rank)) / (case.parts * WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def together(
    case: Case, ddp: DistributedDataParallel, called: Any, rank: int
) -> torch.optim.Optimizer:
    """In this process its own batches, as a script for several GPUs has it."""
    optimizer = case.optimizer(ddp.parameters(), lr=LR, **case.arguments)
    whole = train.compile_step(partial(loss_of, called), optimizer, accumulate=case.parts)
    for step in range(STEPS):
        for part in range(case.parts):
            is_last, args = part + 1 == case.parts, batch(step, part, rank)
            with nullcontext() if is_last else ddp.no_sync():
                if case.compiled_step:
                    whole(*args)
                else:
                    (loss_of(called, *args) / case.parts).backward()
        if not case.compiled_step:
            optimizer.step()
            optimizer.zero_grad()
    assert whole.report().plain_runs == case.compiled_step * STEPS * case.parts
    return optimizer


def state(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in module.named_parameters()}
    if getattr(optimizer, "ema", None) is not None:
        found |= {f"average {n}": t for n, t in enumerate(optimizer.ema.shadow_params)}
        found["norm"] = optimizer.grad_norm
    return found


def both(rank: int, case: Case, how: Options) -> list[dict[str, Tensor]]:
    """A training in company, and the same one alone."""
    single = network(seed=0)
    expected = state(single, alone(case, compiled(case, single, how)))
    torch._dynamo.reset()
    AOT_LOG.records.clear()
    # of its own weights: the first process' are handed to all
    mine = network(seed=rank)
    found = state(mine, together(case, *wrapped(case, mine, how), rank))
    log = AOT_LOG if case.by_torch else mine.forward.log
    assert roles(log) == PAIR
    assert not log.fallbacks
    if not case.by_torch:
        assert mine.forward.traced_by_torch == mine.forward.counters.fallbacks == {}
    return [found, expected]


def products_kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


class Checkpointed(nn.Module):
    """Of more than one bucket. Strop traces no checkpoint itself that chooses what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(
                lambda y, layer=layer: F.silu(layer(y)),
                x,
                use_reentrant=False,
                context_fn=products_kept,
            )
        return x


class Outer(nn.Module):
    """A part of it is averaged over the processes, and a part is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = DistributedDataParallel(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.inner(x)))


def halves(width: int) -> list[Tensor]:
    return list(torch.randn(WORLD, 6, width, generator=torch.Generator().manual_seed(5)))


def mean_gradients(module: nn.Module, width: int) -> dict[str, Tensor]:
    """What averaging should give: those of both halves, in eager."""
    single = copy.deepcopy(module)
    for x in halves(width):
        (loss_of(single, x) / WORLD).backward()
    return {name: p.grad for name, p in single.named_parameters()}


def through_checkpoints(rank: int, how: Options) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Checkpointed()
    expected = mean_gradients(module, 256)
    strop.optimize(module, train=True, options=how)
    ddp = DistributedDataParallel(module, bucket_cap_mb=1)
    loss_of(ddp, halves(256)[rank]).backward()
    assert len(module.forward.traced_by_torch) == 1, "else there is no test here"
    assert roles(module.forward.log) == PAIR, "not cut where a bucket ends"
    assert not module.forward.counters.fallbacks
    return [{name: p.grad for name, p in module.named_parameters()}, expected]


def inside_of_another(rank: int, how: Options) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    outer = Outer()
    plain = nn.Sequential(copy.deepcopy(outer.inner.module), nn.SiLU(), copy.deepcopy(outer.last))
    expected = mean_gradients(plain, 8)
    strop.optimize(outer, train=True, options=replace(how, strict=False))
    loss_of(outer, halves(8)[rank]).backward()
    assert "DistributedDataParallel cannot be traced" in str(outer.forward.traced_by_torch)
    names = "weight", "bias"
    return [
        {name: getattr(outer.inner.module, name).grad for name in names},
        {name: expected[f"0.{name}"] for name in names},
    ]


def inference(rank: int, how: Options) -> list[dict[str, Tensor]]:
    """Calls without gradients are compiled as well."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    expected = mean_gradients(ddp.module, 8)
    assert strop.optimize(ddp, options=how) is ddp
    with torch.no_grad():
        ddp.eval()(halves(8)[0])
    (dispatcher,) = dispatchers_of(ddp).values()
    assert dispatcher is ddp.module.forward
    assert dispatcher.counters.calls == 1
    assert dispatcher.counters.eager_calls == 0
    assert "Linear" in str(strop.explain(ddp))
    strop.restore(ddp)
    assert not dispatchers_of(ddp)
    loss_of(ddp.train(), halves(8)[rank]).backward()
    return [{name: p.grad for name, p in ddp.module.named_parameters()}, expected]


def refused(rank: int) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    with pytest.MonkeyPatch.context() as patch:
        taped.use(patch)
        optimizer = train.FusedSGD(ddp.parameters(), lr=0.1)
        step = train.compile_step(lambda x: loss_of(ddp, x), optimizer)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"compile_step\(graph=False\)"):
                step(halves(8)[rank])
    return {}


def split_optimizer(module: nn.Module, make: Any, arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a script of its own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(module.parameters(), make, **arguments)


def sharded(rank: int, kind: str, depth: int, in_interpreter: bool) -> list[dict[str, Tensor]]:
    """Each process steps a part of the parameters, which may be none. One has no gradient once."""
    torch.manual_seed(0)
    single = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(depth)))
    shared, make = copy.deepcopy(single), getattr(train, kind)
    arguments: dict[str, Any] = {"lr": LR, "max_grad_norm": 1e-2}
    with pytest.MonkeyPatch.context() as patch:
        if in_interpreter:
            interpreted.use(patch)
        alone = make(single.parameters(), **arguments)
        split = split_optimizer(shared, make, arguments)
        assert len(split.optim.parameters()) < depth or depth == 1
        norms: list[dict[str, Tensor]] = [{}, {}]
        for step in range(STEPS):
            for found, module, optimizer in zip(
                norms, (shared, single), (split, alone), strict=True
            ):
                module.zero_grad()
                loss_of(module, halves(8)[0]).backward()
                if step == 1:
                    module[depth - 1].weight.grad = None
                optimizer.step()
                norm = getattr(optimizer, "optim", optimizer).grad_norm
                found[f"norm {step}"] = torch.zeros(()) if norm is None else norm.clone()
    modules = (dict(shared.named_parameters()), dict(single.named_parameters()))
    return [
        {**found, **{n: p.detach() for n, p in module.items()}}
        for found, module in zip(norms, modules, strict=True)
    ]


def not_copied(rank: int) -> dict[str, Tensor]:
    """A copy could not clip by the norm of all."""
    arguments: dict[str, Any] = {"lr": LR, "max_grad_norm": 1e-2}
    module = nn.Linear(8, 8)
    split = split_optimizer(module, train.FusedAdamW, arguments)
    with pytest.raises((TypeError, RuntimeError), match="ProcessGroup"):
        copy.deepcopy(split.optim)
    return {}


# ---- tests -------------------------------------------------------------------------------------

EXTRAS = {"max_grad_norm": 1e-2, "ema_decay": 0.9}
CASES = {
    "torchs": Case(optimizer=torch.optim.AdamW),
    "fused": Case(),
    "clip_and_average": Case(arguments=EXTRAS),
    "views_of_buckets": Case(arguments=EXTRAS, views=True),
    "torchs_accumulated": Case(optimizer=torch.optim.AdamW, parts=2),
    "accumulated": Case(arguments=EXTRAS, parts=2),
    "accumulated_views": Case(arguments=EXTRAS, parts=2, views=True),
    "step": Case(arguments=EXTRAS, compiled_step=True),
    "torchs_step": Case(optimizer=torch.optim.AdamW, compiled_step=True),
    "accumulated_step": Case(arguments=EXTRAS, parts=2, views=True, compiled_step=True),
    "wrapped_first": Case(wrapped_first=True),
    "compiled_by_torch": Case(by_torch=True),
    "torch_around_it": Case(by_torch=True, wrapped_first=True),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(name: str, ranks: Ranks) -> None:
    (first, expected), (second, _) = ranks.run(partial(both, case=CASES[name], how=options()))
    start = dict(network(seed=0).named_parameters())
    for key, value in first.items():
        assert torch.equal(value, second[key]), f"{key} differs between the processes"
        error = (value - expected[key]).norm() / expected[key].norm()
        assert error <= 1e-6, f"{key} is off by {error}"
        if key in start:
            assert (value - start[key]).abs().max() > 2 * LR, f"{key} was not trained"


@pytest.mark.parametrize("training", [through_checkpoints, inside_of_another, inference])
def test_gradients_are_averaged_once(training: Callable[..., Any], ranks: Ranks) -> None:
    (first, expected), (second, _) = ranks.run(partial(training, how=options()))
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs between the processes"
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("in_interpreter", [False, True])
@pytest.mark.parametrize(("kind", "depth"), [("FusedAdamW", 4), ("FusedSGD", 3), ("FusedAdam", 1)])
def test_shards_are_clipped_by_the_norm_of_all(
    kind: str, depth: int, in_interpreter: bool, ranks: Ranks
) -> None:
    """A share's own norm would clip it less, so that the model would be another one."""
    if in_interpreter:
        pytest.importorskip("triton")
    asked = partial(sharded, kind=kind, depth=depth, in_interpreter=in_interpreter)
    (first, expected), (second, _) = ranks.run(asked)
    for key, value in expected.items():
        torch.testing.assert_close(first[key], value, rtol=1e-5, atol=1e-7)
        if depth > 1 or "norm" not in key:  # a process without parameters knows no norm
            assert torch.equal(first[key], second[key]), f"{key} differs between the processes"


def test_a_share_of_parameters_is_not_copied(ranks: Ranks) -> None:
    ranks.run(not_copied)


def test_refusals(ranks: Ranks) -> None:
    pytest.importorskip("triton")  # of the tapes in the place of CUDA graphs
    ranks.run(refused)
