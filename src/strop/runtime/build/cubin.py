"""The machine code of a Triton kernel has a form on disk, a key, and a request that makes it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch

from strop.codegen import triton_worker
from strop.errors import CacheError, CodegenError
from strop.ir.device import GpuTarget
from strop.ir.functions import SM_90
from strop.ir.source import KernelSource

TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
# CUtensorMapDataType
BOX_TYPES = {
    torch.uint8: 0,
    torch.int32: 3,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a line


@dataclass(frozen=True, slots=True)
class Box:
    """This says how the tensor memory accelerator moves a piece of a tensor: ``sizes`` in elements,
    the last dim being dense, and the numbers of CUtensorMapDataType and CUtensorMapSwizzle.
    ``steps`` go from one element of the piece to the next, by dim; () stands for 1."""

    sizes: tuple[int, ...]
    dtype: int
    swizzle: int
    steps: tuple[int, ...] = ()

    @staticmethod
    def of(sizes: Sequence[int], dtype: int, swizzle: int, steps: Sequence[int] = ()) -> Box:
        """Make a box from what JSON can say."""
        return Box(tuple(sizes), dtype, swizzle, tuple(steps))


@dataclass(frozen=True, slots=True)
class Cubin:
    """This is the machine code of one kernel, which uses the features of ``arch``."""

    entry: str
    code: bytes
    shared: int  # bytes of dynamic shared memory
    num_warps: int
    arch: int
    early: bool = False  # waits for the kernel before it on its own
    boxes: tuple[Box | None, ...] = ()  # per param, or none has one

    @staticmethod
    def of(header: Mapping[str, Any], code: bytes) -> Cubin:
        """Make a cubin from its code and what JSON can say."""
        boxes = [box and Box.of(*box) for box in header.get("boxes", ())]
        return Cubin(**{**header, "code": code, "boxes": tuple(boxes)})

    def to_bytes(self) -> bytes:
        """Write a line of JSON, then the code."""
        header = {
            "entry": self.entry,
            "shared": self.shared,
            "num_warps": self.num_warps,
            "arch": self.arch,
            "early": self.early,
            "boxes": [box and astuple(box) for box in self.boxes],
            "sha256": hashlib.sha256(self.code).hexdigest(),
        }
        return json.dumps(header).encode() + b"\n" + self.code

    @staticmethod
    def from_bytes(data: bytes) -> Cubin:
        line, _, code = data.partition(b"\n")
        try:
            header = json.loads(line)
            digest = header.pop("sha256")
            cubin = Cubin.of(header, code)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"not a compiled kernel: {line[:80]!r}") from error
        if digest != hashlib.sha256(code).hexdigest():
            raise CacheError(f"compiled kernel {cubin.entry!r} is damaged: its digest differs")
        return cubin


def request_of(source: KernelSource, target: GpuTarget) -> dict[str, Any]:
    """Return the compile request: plain data, everything that decides the machine code. Raises
    CodegenError for a kernel in PTX where the target lacks what it is written for."""
    if source.language == "ptx":
        return _assembly_request(source, target)
    boxes = [source.box(n) for n in range(len(source.params))]
    types = [_param_type(dtype, box) for dtype, box in zip(source.params, boxes, strict=True)]
    types += ["*" + TYPES[scratch.dtype] for scratch in source.scratch]
    divisible = [place for place, text in enumerate(types) if text.startswith("*")]
    divisible += [len(types) + i for i, k in enumerate(source.scalars) if k % 16 == 0]
    types += ["i64" if source.wide else "i32"] * (len(source.scalars) + (source.split is not None))
    if not target.has_pdl:
        source = source.with_constants(EARLY=0)
    if not target.rounds_to_e4m3:
        source = source.with_constants(**{SM_90: 0})
    types += ["constexpr"] * len(source.constants)
    names = _argument_names(source)
    return {
        "name": source.name,
        "text": source.text,
        "signature": dict(zip(names, types, strict=True)),
        "constants": dict(source.constants),
        "divisible": divisible,
        "num_warps": source.num_warps,
        "max_registers": source.max_registers,
        **_target_fields(target),
        "boxes": [box and BOX_TYPES[dtype] for dtype, box in zip(source.params, boxes, strict=True)]
        if any(boxes)
        else [],
    }


def _target_fields(target: GpuTarget) -> dict[str, int]:
    """Give one number where code and features are of one architecture, so that keys stay as they
    are."""
    fields = {"arch": target.arch}
    return fields if target.is_native else {**fields, "runs_on": target.runs_on}


def _assembly_request(source: KernelSource, target: GpuTarget) -> dict[str, Any]:
    if not target.is_native:
        raise CodegenError(
            f"{source.name} is written in PTX for sm_{target.runs_on}, and cannot be compiled as if"
            f" for sm_{target.arch}"
        )
    boxes = [source.box(n) for n in range(len(source.params))]
    steps = [[source.steps] if source.steps and n == 0 else [] for n in range(len(boxes))]
    return {
        "language": "ptx",
        "name": source.name,
        "text": source.text,
        "constants": dict(source.constants),
        "num_warps": source.num_warps,
        **_target_fields(target),
        "boxes": [
            [box, BOX_TYPES[dtype], SWIZZLES[box[-1] * dtype.itemsize], *step] if box else None
            for dtype, box, step in zip(source.params, boxes, steps, strict=True)
        ],
    }


def _param_type(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    if not box:
        return "*" + TYPES[dtype]
    return f"tensordesc<{TYPES[dtype]}[{','.join(map(str, box))}]>"


def _argument_names(source: KernelSource) -> list[str]:
    header = source.text.index(f"def {source.name}(") + len(f"def {source.name}(")
    arguments = source.text[header : source.text.index("):", header)]
    return [argument.split(":")[0].strip() for argument in arguments.split(",") if argument.strip()]


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Return the installed version, without importing Triton. Raises CodegenError if there is
    none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise CodegenError("Triton is not installed; `pip install triton` on Linux") from None


@lru_cache(maxsize=4096)
def content_key(source: KernelSource, target: GpuTarget) -> str:
    """Return a digest of what is compiled, whichever Triton compiles it. Artefacts find kernels by
    it where there is no Triton."""
    content = json.dumps(request_of(source, target), sort_keys=True)
    return hashlib.sha256(f"cubin 1 {content}".encode()).hexdigest()


@lru_cache(maxsize=4096)
def cache_key(source: KernelSource, target: GpuTarget) -> str:
    """Return the key in the disk cache. Raises CodegenError where there is no Triton."""
    content = f"{triton_version()} {content_key(source, target)}"
    return hashlib.sha256(content.encode()).hexdigest()


def compile_cubin(source: KernelSource, arch: int, runs_on: int = 0) -> Cubin:
    """Compile in this process. ``arch``: 80, 86, 89, 90, 100, ..., as is ``runs_on``."""
    try:
        request = request_of(source, GpuTarget(arch, runs_on))
        header, code = triton_worker.compile_request(request)
    except ImportError as error:
        raise CodegenError("Triton is not installed; `pip install triton` on Linux") from error
    return Cubin.of(header, code)
