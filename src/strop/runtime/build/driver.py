"""Loads machine code and launches it through the CUDA driver: ctypes on libcuda, no Triton.

A bound launch is one foreign call whose arguments were all built before: pointers and the stream
are patched in place. A CUDA context must be current, as torch makes it.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from ctypes import (
    Structure,
    byref,
    c_byte,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch

from strop.errors import CodegenError
from strop.ir.source import MOST_EARLY_PROGRAMS
from strop.runtime.build.cubin import BOX_TYPES, Box, Cubin

_LOCAL_BYTES, _MAX_DYNAMIC_SHARED = 3, 8  # CUfunction_attribute
_STATIC_SHARED_LIMIT = 48 * 1024
_INT_LIMIT = 2**31
_PROGRAMMATIC_SERIALIZATION = 6  # CUlaunchAttributeID
_MAP_BYTES, _MAP_ALIGNMENT, _PROMOTION_128B = 128, 64, 2  # of a CUtensorMap
_BOX_WIDTHS = {number: dtype.itemsize for dtype, number in BOX_TYPES.items()}


class _Attribute(Structure):
    """Declare CUlaunchAttribute with a value of one int."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class _Config(Structure):
    """Declare CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


_EARLY = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
NOWHERE = 1 << 20  # an aligned address for tensors that are not known yet
# Sizes and strides of a tensor, in elements; and sizes of its box, where the launch tells them.
View = tuple[Sequence[int], ...]


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    return _loaded(ctypes.CDLL)


@lru_cache(maxsize=1)
def _cuda_with_lock() -> ctypes.CDLL:
    """Return the driver with calls that keep the interpreter's lock, for those of a microsecond.
    One that gives it up waits up to 5 ms to have it back (``sys.getswitchinterval``) where another
    thread of Python is at work, as while kernels are built."""
    return _loaded(ctypes.PyDLL)


def _loaded(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    try:
        cuda = kind("libcuda.so.1")
    except OSError as error:
        raise CodegenError(
            "libcuda.so.1 was not found: GPU kernels need an NVIDIA driver on this machine"
        ) from error
    cuda.cuLaunchKernelEx.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    cuda.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    cuda.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    cuda.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    cuda.cuFuncGetAttribute.argtypes = [c_void_p, c_int, c_void_p]
    if hasattr(cuda, "cuTensorMapEncodeTiled"):  # drivers for CUDA 12
        cuda.cuTensorMapEncodeTiled.argtypes = [
            c_void_p,
            c_int,
            c_uint,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int,
            c_int,
            c_int,
            c_int,
        ]
        cuda.cuTensorMapReplaceAddress.argtypes = [c_void_p, c_void_p]
    return cuda


_TOO_OLD = "this driver is for CUDA {version}, older than the compiler of the kernels: update it"
_BUG = "a bug of Strop's: find the kernel with STROP_CHECK=1, or with compute-sanitizer"
ADVICE = {
    100: "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    **dict.fromkeys((200, 209, 218, 222), _TOO_OLD),  # images that the driver cannot read
    **dict.fromkeys((700, 716, 719), _BUG),
    803: "libcuda.so.1 and the loaded kernel module are of different drivers: reload it, or reboot",
    804: "this GPU cannot run a newer CUDA than its driver's: update the driver, or take an older"
    " torch",
}
_OUT_OF_MEMORY = 2


def version() -> str:
    """The newest CUDA that the driver knows, like "13.0"."""
    found = c_int()
    _cuda().cuDriverGetVersion(byref(found))
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def attribute(index: int, number: int) -> int:
    """One number that the driver knows of a GPU: ``number`` is a CUdevice_attribute."""
    device, value = c_int(), c_int()
    _check(_cuda().cuDeviceGet(byref(device), index), f"looking for GPU {index}")
    code = _cuda().cuDeviceGetAttribute(byref(value), number, device)
    _check(code, f"asking GPU {index} for attribute {number}")
    return value.value


def call(what: str, name: str, *given: object) -> None:
    """Call a function of the driver that gives a CUresult. ``what`` is said in its error."""
    _check(getattr(_cuda(), name)(*given), what)


def _describe(what: str, name: str, *given: object) -> None:
    """Call a function of the driver that works on a tensor map, which takes some 2 us."""
    _check(getattr(_cuda_with_lock(), name)(*given), what)


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    text = c_char_p()
    _cuda().cuGetErrorString(code, byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    message = f"CUDA error {code} ({reason}) while {what}"
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(message)
    if code in ADVICE:
        message += "; " + ADVICE[code].format(version=version())
    raise CodegenError(message)


@dataclass(frozen=True, eq=False, slots=True)  # equal ones are one object
class _Geometry:
    """Say what a tensor map says but where the tensor lies, in the driver's order: from the
    innermost dim on. ``context`` is that of the GPU for which it is written."""

    dtype: int
    swizzle: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]  # but the innermost, which is taken for granted
    reach: tuple[int, ...]
    steps: tuple[int, ...]
    context: int


@lru_cache(maxsize=1 << 12)
def _geometry(
    box: Box, sizes: tuple[int, ...], strides: tuple[int, ...], told: tuple[int, ...], context: int
) -> _Geometry:
    """Take the sizes of a box that the launch has ``told``, or the kernel's."""
    of_box, width = told or box.sizes, _BOX_WIDTHS[box.dtype]
    steps = box.steps or (1,) * len(of_box)
    reach = [size * step for size, step in zip(of_box, steps, strict=True)]
    distances = tuple(width * step for step in reversed(strides[:-1]))
    dims = (sizes[::-1], distances, tuple(reach[::-1]), steps[::-1])
    return _Geometry(box.dtype, box.swizzle, *dims, context)


def _map_memory() -> tuple[memoryview, int]:
    """Return room for one tensor map, and its address."""
    room = bytearray(_MAP_BYTES + _MAP_ALIGNMENT)
    begin = ctypes.addressof((c_byte * len(room)).from_buffer(room))
    skipped = -begin % _MAP_ALIGNMENT
    return memoryview(room)[skipped : skipped + _MAP_BYTES], begin + skipped


@lru_cache(maxsize=1 << 14)
def _described(geometry: _Geometry, pointer: int) -> bytes:
    """Return a tensor map. Repeated blocks have the same ones but for their addresses, and a
    program that is bound again has the very same ones: the driver encodes one of each geometry,
    and is told the others' addresses."""
    memory, address = _map_memory()
    if pointer != NOWHERE:
        memory[:] = _described(geometry, NOWHERE)
        what = f"moving a tensor map to {pointer:#x}"
        _describe(what, "cuTensorMapReplaceAddress", address, pointer)
        return bytes(memory)
    rank = len(geometry.reach)
    _describe(
        f"describing {geometry.sizes[::-1]} with strides of {geometry.strides_bytes[::-1]} bytes",
        "cuTensorMapEncodeTiled",
        address,
        geometry.dtype,
        rank,
        pointer,
        (c_uint64 * rank)(*geometry.sizes),
        (c_uint64 * rank)(*geometry.strides_bytes),
        (c_uint32 * rank)(*geometry.reach),
        (c_uint32 * rank)(*geometry.steps),
        0,
        geometry.swizzle,
        _PROMOTION_128B,
        0,
    )
    return bytes(memory)


class TensorMap:
    """Hold a CUtensorMap: a tensor whose boxes the tensor memory accelerator moves
    (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html). Boxes begin
    anywhere; outside of the tensor they read zeros and write nothing."""

    __slots__ = ("_entry", "_geometry", "_memory", "_pointer", "address")

    def __init__(self, box: Box, pointer: int, view: View, function: CudaFunction) -> None:
        """The last dim is dense; the pointer is a multiple of 16 bytes, and so are the strides."""
        sizes, strides, *told = map(tuple, view)
        box_sizes = told[0] if told else ()
        self._geometry = _geometry(box, sizes, strides, box_sizes, function.context)
        self._memory, self.address = _map_memory()
        self._entry, self._pointer = function.cubin.entry, pointer
        self._describe()

    @property
    def value(self) -> int:
        """Return where the tensor lies; this may be set, as that of the pointer which it stands
        for."""
        return self._pointer

    @value.setter
    def value(self, pointer: int) -> None:
        if pointer != self._pointer:
            self._pointer = pointer
            self._describe()

    def _describe(self) -> None:
        try:
            self._memory[:] = _described(self._geometry, self._pointer)
        except CodegenError as error:
            raise CodegenError(f"{error}, for {self._entry}") from error


class CudaFunction:
    """Hold one kernel in the memory of one device."""

    __slots__ = ("_handle", "_module", "context", "cubin")

    def __init__(self, cubin: Cubin, context: int = 0) -> None:
        """Load into the current context, which is ``context``."""
        cuda = _cuda()
        self.cubin, self.context = cubin, context
        self._module, self._handle = c_void_p(), c_void_p()
        _check(cuda.cuModuleLoadData(byref(self._module), cubin.code), f"loading {cubin.entry}")
        name = cubin.entry.encode()
        code = cuda.cuModuleGetFunction(byref(self._handle), self._module, name)
        _check(code, f"looking up {cubin.entry}")
        if cubin.shared > _STATIC_SHARED_LIMIT:
            code = cuda.cuFuncSetAttribute(self._handle, _MAX_DYNAMIC_SHARED, cubin.shared)
            _check(code, f"asking for {cubin.shared} bytes of shared memory for {cubin.entry}")

    @property
    def spilled_bytes(self) -> int:
        """Return the local memory of a thread: spills and stack."""
        return self._attribute(_LOCAL_BYTES)

    def _attribute(self, which: int) -> int:
        value = c_int()
        code = _cuda().cuFuncGetAttribute(byref(value), which, self._handle)
        _check(code, f"asking about {self.cubin.entry}")
        return value.value

    def bind(
        self,
        pointers: Sequence[int],
        scalars: Sequence[int],
        grid: Sequence[int],
        stream: int = 0,
        *,
        wide: bool = False,
        early: bool = False,
        views: Sequence[View] = (),
    ) -> BoundLaunch:
        """A launch with these arguments: params, scratch, then integers (``wide``: of 64 bits).
        ``early``: before the last launch has ended, where the kernel can wait for it. ``views``:
        of each param that has a box, in order."""
        return BoundLaunch(
            self, pointers, scalars, grid, stream, wide=wide, early=early, views=views
        )


class BoundLaunch:
    """A prepared launch; calling it is one foreign call. Not to be shared between threads."""

    __slots__ = (
        "_arguments",
        "_call",
        "_config",
        "_function",
        "_is_empty",
        "_pointers",
        "_values",
    )

    def __init__(
        self,
        function: CudaFunction,
        pointers: Sequence[int],
        scalars: Sequence[int],
        grid: Sequence[int],
        stream: int,
        *,
        wide: bool = False,
        early: bool = False,
        views: Sequence[View] = (),
    ) -> None:
        for value in scalars:
            if not wide and not -_INT_LIMIT <= value < _INT_LIMIT:
                raise CodegenError(
                    f"{function.cubin.entry}: the size {value} does not fit in 32 bits; "
                    "use a smaller batch or image"
                )
        self._function = function  # keeps the module alive
        self._pointers, self._values = _placed(function, pointers, views)
        self._values += map(c_int64 if wide else c_int32, scalars)
        # After the declared arguments Triton passes two pointers to scratch of its own: unused.
        self._values += [c_void_p(), c_void_p()]
        self._arguments = (c_void_p * len(self._values))(*map(_address, self._values))
        shape, cubin = (*grid, 1, 1, 1)[:3], function.cubin
        self._is_empty = 0 in shape
        early &= cubin.early and math.prod(shape) <= MOST_EARLY_PROGRAMS
        self._config = _Config(
            shape,
            (32 * cubin.num_warps, 1, 1),
            cubin.shared,
            stream,
            ctypes.addressof(_EARLY),
            int(early),
        )
        self._call = (byref(self._config), function._handle, self._arguments, None)

    def set_pointer(self, place: int, pointer: int) -> None:
        self._pointers[place].value = pointer

    def set_stream(self, stream: int) -> None:
        self._config.stream = stream

    def __call__(self) -> None:
        if self._is_empty:
            return  # an error to the driver
        code = _launch(*self._call)
        if code:
            _check(code, f"launching {self._function.cubin.entry}")


def _placed(
    function: CudaFunction, pointers: Sequence[int], views: Sequence[View]
) -> tuple[list[c_void_p | TensorMap], list[Any]]:
    """The pointers, and all arguments that Triton makes of them: behind a tensor map it passes the
    tensor's sizes and strides, which the accelerator has from the map."""
    found: list[c_void_p | TensorMap] = []
    values: list[Any] = []
    left = iter(views)
    for pointer, box in zip_longest(pointers, function.cubin.boxes[: len(pointers)]):
        if box is None:
            found.append(c_void_p(pointer))
            values.append(found[-1])
        else:
            sizes, strides, *_ = view = next(left)
            found.append(TensorMap(box, pointer, view, function))
            values += [found[-1], *map(c_int32, sizes), *map(c_int64, strides)]
    return found, values


def _address(value: Any) -> int:
    return value.address if isinstance(value, TensorMap) else ctypes.addressof(value)


def _launch(*args: object) -> int:
    """The driver's entry point; replaces itself with the foreign function at the first call."""
    global _launch
    _launch = _cuda().cuLaunchKernelEx
    return int(_launch(*args))


_LOADED: dict[tuple[Cubin, int], CudaFunction] = {}
_LOCK = threading.Lock()


def load(cubin: Cubin) -> CudaFunction:
    """The kernel in the current context, loaded once."""
    context = current_context()
    with _LOCK:
        function = _LOADED.get((cubin, context))
        if function is None:
            function = _LOADED[cubin, context] = CudaFunction(cubin, context)
    return function


_OF_THREAD = threading.local()


def enter_thread(index: int) -> None:
    """Have the context of GPU ``index`` in this thread, so that it may launch there what others
    have loaded. torch's current device is that one already; where nothing has been done on it in
    this thread, the driver may still have another."""
    if getattr(_OF_THREAD, "index", None) == index:
        return
    current_context()
    device = c_int32()
    _check(_cuda().cuCtxGetDevice(byref(device)), "asking for the device of a context")
    if device.value != index:
        _enter_primary(index)
    _OF_THREAD.index = index


def _enter_primary(index: int) -> int:
    """Make the context of GPU ``index`` that torch uses the current one, and return it."""
    context, device = c_void_p(), c_int32()
    _check(_cuda().cuDeviceGet(byref(device), index), "finding the device")
    retained = _cuda().cuDevicePrimaryCtxRetain(byref(context), device)
    _check(retained, "asking for the device's context")
    _check(_cuda().cuCtxSetCurrent(context), "making a context current")
    if not context.value:
        raise CodegenError(f"the driver gave no context for device {device.value}")
    return context.value


def current_context() -> int:
    """Return the thread's CUDA context. A thread in which torch has done nothing on a GPU yet has
    none, and gets the one of torch's current device, which its other threads use."""
    context = c_void_p()
    _check(_cuda().cuCtxGetCurrent(byref(context)), "asking for the current context")
    return context.value or _enter_primary(torch.cuda.current_device())
