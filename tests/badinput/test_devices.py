"""Devices without kernels, several devices at once, and drivers that do not fit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.cli.arguments import DeviceName, chosen_device
from strop.errors import CodegenError, UnsupportedError
from strop.runtime.build import driver
from strop.runtime.build import loader as kernels
from strop.runtime.build.cubin import Cubin

from .nets import Net, X, optimized


def test_a_device_without_kernels_runs_in_eager(caplog: Any) -> None:
    module = optimized(Net().to("meta"))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        for _ in range(2):
            assert module(X.to("meta")).is_meta
    (message,) = caplog.messages
    assert "no code generator for the device meta" in message
    assert "tested on x86-64 processors (cpu) and on NVIDIA H100 (cuda)" in message
    with torch.no_grad(), pytest.raises(UnsupportedError, match="device meta"):
        optimized(Net().to("meta"), strict=True)(X.to("meta"))


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_other_devices_are_refused_by_name(device: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the device {device}; Strop is tested on"):
        kernels.kernel_loader(device, 0, "", 0)


def test_amd_and_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedError, match="AMD"):
        kernels.kernel_loader("cuda", 0, "", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GeForce GTX 1080")
    with pytest.raises(UnsupportedError, match=r"GTX 1080 has compute capability 6\.1"):
        kernels.kernel_loader("cuda", 0, "", 0)


def test_arguments_on_another_device_are_eagers_matter() -> None:
    module = optimized(Net())
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="not on the expected device"):
            module(X.to("meta"))
        torch.testing.assert_close(module(X), module.forward.eager(X))
        with pytest.raises(UnsupportedError, match="several devices: cpu, meta"):
            optimized(Net(), strict=True)(X.to("meta"))


def test_torch_compile_names_the_device_too(caplog: Any) -> None:
    torch._dynamo.reset()
    fast = torch.compile(Net().eval().to("meta"), backend="strop")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        assert fast(X.to("meta")).is_meta
    assert "no code generator for the device meta" in caplog.text


# the driver


class Library:
    """A libcuda whose calls end with these codes."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: self.codes.get(name, 0)

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = f"error number {code}".encode()
        return 0

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = 11040
        return 0


CUBIN = Cubin("scale", b"", 0, 4, 90)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (200, "this driver is for CUDA 11.4, older than the compiler"),
        (209, "update it"),
        (222, "update it"),
        (803, "reload it, or reboot"),
        (999, r"CUDA error 999 \(error number 999\) while loading scale$"),
    ],
)
def test_a_driver_that_refuses_a_kernel(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    monkeypatch.setattr(driver, "_cuda", lambda: Library(cuModuleLoadData=code))
    with pytest.raises(CodegenError, match=text):
        driver.CudaFunction(CUBIN)


def test_a_driver_without_memory_is_torchs_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_cuda", lambda: Library(cuModuleLoadData=2))
    with pytest.raises(torch.OutOfMemoryError, match="while loading scale"):
        driver.CudaFunction(CUBIN)


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    driver._cuda.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(CodegenError, match="need an NVIDIA driver on this machine"):
        driver.version()


def test_the_command_line_says_what_torch_says_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import warnings

    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert chosen_device(DeviceName.auto) == "cpu"
    with pytest.raises(Exception, match="driver on your system is too old; use --device cpu"):
        chosen_device(DeviceName.cuda)


# several GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
class TestTwoGpus:
    """The current device is cuda:0 throughout; graphs start at a shape's second use."""

    @staticmethod
    def inputs(rows: int) -> Tensor:
        return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))

    def test_a_module_on_the_second_gpu(self) -> None:
        module, plain = optimized(Net().to("cuda:1"), strict=True), Net().eval()
        with torch.no_grad():
            for rows in (3, 3, 3, 7, 7, 7):
                x = self.inputs(rows)
                found = module(x.to("cuda:1"))
                assert found.device == torch.device("cuda:1")
                torch.testing.assert_close(found.cpu(), plain(x), rtol=1e-4, atol=1e-5)
        assert torch.cuda.current_device() == 0
        assert module.forward.counters.replays == 4

    def test_an_argument_on_the_other_gpu_is_eagers_error(self) -> None:
        module = optimized(Net().to("cuda:1"))
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="same device"):
                module(self.inputs(3).to("cuda:0"))
            module(self.inputs(3).to("cuda:1"))

    def test_torch_compile_on_the_second_gpu(self) -> None:
        torch._dynamo.reset()
        module, x = Net().eval().to("cuda:1"), self.inputs(3).to("cuda:1")
        fast = torch.compile(module, backend="strop", options={"strict": True})
        with torch.no_grad():
            torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-5)

    def test_two_gpus_from_two_threads(self) -> None:
        plain = Net().eval()
        nets = [Net().to(f"cuda:{index}") for index in range(2)]
        wrong: list[tuple[int, int]] = []

        def work(index: int) -> None:
            module = optimized(nets[index], strict=True)
            with torch.no_grad():
                for step in range(40):
                    x = self.inputs(1 + step % 5)
                    found = module(x.to(f"cuda:{index}")).cpu()
                    if not torch.allclose(found, plain(x), rtol=1e-4, atol=1e-5):
                        wrong.append((index, step))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
