"""Kernels with tensor maps: what is compiled, what is stored, what a launch hands to the driver."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.tensor_maps import busy_thread
from strop.errors import CodegenError
from strop.ir.device import GpuTarget
from strop.runtime.build import driver
from strop.runtime.build.cubin import Box, Cubin, cache_key, compile_cubin, request_of
from strop.runtime.build.driver import BoundLaunch, TensorMap
from tests.codegen.boxes import COLS, ROWS, shifted

DIMS = 2  # of each tensor


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    pytest.importorskip("triton")
    return compile_cubin(shifted(), 90)


def test_only_params_with_a_box_are_descriptors() -> None:
    request = request_of(shifted(torch.bfloat16), GpuTarget(90))
    types = list(request["signature"].values())
    described = f"tensordesc<bf16[{ROWS},{COLS}]>"
    assert types == [described, "*bf16", described, "i32", "i32", "constexpr"]
    assert request["divisible"] == [1]
    assert cache_key(shifted(cols=32), GpuTarget(90)) != cache_key(shifted(), GpuTarget(90))


def test_the_compiler_says_how_a_box_lies(cubin: Cubin) -> None:
    first, none, last = cubin.boxes
    assert none is None
    assert first is not None
    # 128 bytes are the most that lie in a row: a line of 64 floats is two pieces
    assert first.sizes == (ROWS, COLS // 2)
    assert (first.dtype, first.swizzle) == (7, 3)
    assert last == first
    assert Cubin.from_bytes(cubin.to_bytes()) == cubin


def write(address: int, *numbers: int) -> None:
    """Put numbers where a map lies: the pointer, and which of the maps that were encoded it is."""
    for place, number in enumerate(numbers):
        ctypes.c_uint64.from_address(address + 8 * place).value = number


def read(place: Any) -> tuple[int, int]:
    """Return these numbers of a map."""
    pointer, which = (ctypes.c_uint64 * 2).from_address(place.address)
    return pointer, which


class Driver:
    """Stands for libcuda: keeps what it is asked for."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.maps, self.moves = code, list[Any](), list[Any]()

    def cuTensorMapEncodeTiled(
        self, address: int, dtype: int, rank: int, pointer: int, *rest: Any
    ) -> int:
        extents, steps, sizes, ones, interleave, swizzle, promotion, fill = rest
        assert address % 64 == 0
        write(address, pointer, len(self.maps))
        self.maps.append(
            {
                "pointer": pointer,
                "dtype": dtype,
                "rank": rank,
                "swizzle": swizzle,
                "extents": list(extents),
                "steps": list(steps)[: rank - 1],
                "sizes": list(sizes),
                "ones": list(ones),
                "rest": (interleave, promotion, fill),
            }
        )
        return self.code

    def cuTensorMapReplaceAddress(self, address: int, pointer: int) -> int:
        self.moves.append(pointer)
        write(address, pointer)
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 1


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """The next driver gives other maps."""
    yield
    driver._described.cache_clear()


def launch_of(cubin: Cubin, *pointers: int, context: int = 0, rows: int = 24) -> Any:
    function: Any = SimpleNamespace(cubin=cubin, context=context, _handle=ctypes.c_void_p())
    views = [((40, COLS), (128, 1)), ((rows, COLS), (COLS, 1))]
    return BoundLaunch(function, pointers, [24, -3], [2], 0, views=views)


def bound(cubin: Cubin, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> tuple[Driver, Any]:
    cuda = Driver(code)
    for name in ("_cuda", "_cuda_with_lock"):
        monkeypatch.setattr(driver, name, lambda: cuda)
    return cuda, launch_of(cubin, 1 << 21, 2 << 20, 3 << 20)


def test_a_launch_passes_maps_sizes_and_strides(
    cubin: Cubin, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, launch = bound(cubin, monkeypatch)
    first, last = cuda.maps
    assert first == {
        "pointer": driver.NOWHERE,
        "dtype": 7,
        "rank": 2,
        "swizzle": 3,
        "extents": [COLS, 40],
        "steps": [512],
        "sizes": [COLS // 2, ROWS],
        "ones": [1, 1],
        "rest": (0, 2, 0),
    }
    assert (last["extents"], last["steps"]) == ([COLS, 24], [256])
    assert [read(launch._pointers[n]) for n in (0, 2)] == [(1 << 21, 0), (3 << 20, 1)]
    kinds = [type(value).__name__ for value in launch._values]
    described = ["TensorMap", "c_int", "c_int", "c_long", "c_long"]
    assert kinds == [*described, "c_void_p", *described, "c_int", "c_int", "c_void_p", "c_void_p"]
    assert [value.value for value in launch._values[1:5]] == [40, COLS, 128, 1]
    assert launch._arguments[0] == launch._values[0].address


def test_it_is_as_many_arguments_as_the_kernel_takes(
    cubin: Cubin, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from strop.codegen.triton_worker import jit_function

    request = request_of(shifted(), GpuTarget(90))
    source = ASTSource(
        fn=jit_function(request["name"], request["text"]),
        signature=request["signature"],
        constexprs=request["constants"],
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    params = re.findall(r"\.param (\.align 64 \.b8|\.u32|\.u64)", text)
    _, launch = bound(cubin, monkeypatch)
    widths: dict[str, tuple[type, ...]] = {
        ".align 64 .b8": (TensorMap,),
        ".u32": (ctypes.c_int,),
        ".u64": (ctypes.c_long, ctypes.c_void_p),
    }
    assert len(params) == len(launch._values)
    assert all(
        isinstance(value, widths[kind]) for kind, value in zip(params, launch._values, strict=True)
    )


def test_pointers_move_maps_too(cubin: Cubin, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, launch = bound(cubin, monkeypatch)
    launch.set_pointer(2, 5 << 20)
    launch.set_pointer(1, 4 << 20)
    assert cuda.moves == [1 << 21, 3 << 20, 5 << 20]
    assert [pointer.value for pointer in launch._pointers] == [1 << 21, 4 << 20, 5 << 20]
    assert read(launch._pointers[2]) == (5 << 20, 1)


def test_what_is_known_is_not_asked_again(cubin: Cubin, monkeypatch: pytest.MonkeyPatch) -> None:
    """One map is encoded of each geometry on each device, and one is moved to each address."""
    cuda, first = bound(cubin, monkeypatch)
    again = launch_of(cubin, 1 << 21, 2 << 20, 3 << 20)
    assert (len(cuda.maps), len(cuda.moves)) == (2, 2)
    for place in (0, 2):
        assert read(again._pointers[place]) == read(first._pointers[place])
        assert again._pointers[place].address != first._pointers[place].address
    again.set_pointer(0, 7 << 20)
    again.set_pointer(0, 7 << 20)
    again.set_pointer(2, 3 << 20)
    assert (len(cuda.maps), len(cuda.moves)) == (2, 3)
    assert read(first._pointers[0]) == (1 << 21, 0), "each launch has a map of its own"
    assert read(again._pointers[0]) == (7 << 20, 0)
    launch_of(cubin, 1 << 21, 2 << 20, 3 << 20, rows=25)
    assert len(cuda.maps) == 3
    launch_of(cubin, 1 << 21, 2 << 20, 3 << 20, context=5)
    assert len(cuda.maps) == 5


def test_what_the_driver_refuses_is_named(cubin: Cubin, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CodegenError, match=r"describing \(40, 64\) with strides of \(512,\) bytes, for "
    ):
        bound(cubin, monkeypatch, code=1)


def test_kernels_without_boxes_have_none() -> None:
    assert Cubin("k", b"", 0, 4, 90).boxes == ()
    assert (
        Box((1, 2), 6, 3)
        == Cubin.of(
            {"entry": "k", "shared": 0, "num_warps": 4, "arch": 90, "boxes": [[[1, 2], 6, 3]]}, b""
        ).boxes[0]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_maps_are_encoded_while_a_thread_is_at_work() -> None:
    """A call that gave up the interpreter's lock would wait 5 ms for it, again and again."""
    torch.cuda.init()
    geometry = driver._Geometry(6, 3, (64, 96), (256,), (64, 32), (1, 1), 0)
    times = []
    with busy_thread():
        for n in range(400):
            begin = time.perf_counter()
            driver._described(geometry, (n + 1) << 21)
            times.append(time.perf_counter() - begin)
    assert sum(seconds > 2e-3 for seconds in times) < 20  # a turn of the other thread is 5 ms
