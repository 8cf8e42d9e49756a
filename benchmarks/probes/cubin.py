"""Generated Triton kernels, compiled ahead of time. Imports no torch: spawn workers use it."""

from __future__ import annotations

import importlib.util
import pathlib
import time
from typing import Any

HEAD = "import triton\nimport triton.language as tl\n"


def many_args(count: int) -> str:
    """Source of a kernel of `count` arguments: pointers o and x, ints; o = x + the ints' sum."""
    ints = [f"a{i}" for i in range(count - 2)]
    total = " + ".join(ints)
    return (
        f"@triton.jit\ndef args{count}(o, x, {', '.join(ints)}, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        f"    tl.store(o + i, tl.load(x + i) + ({total}))\n\n\n"
    )


def pointwise(index: int) -> str:
    """Source of one of many different pointwise kernels."""
    return (
        f"@triton.jit\ndef pw{index}(o, x, y, n, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    v = tl.load(x + i, mask=i < n).to(tl.float32)\n"
        "    u = tl.load(y + i, mask=i < n).to(tl.float32)\n"
        f"    r = v * tl.sigmoid(v * {index + 1}.5) + u\n"
        "    tl.store(o + i, r.to(tl.float16), mask=i < n)\n\n\n"
    )


def write_module(path: pathlib.Path, sources: list[str]) -> None:
    path.write_text(HEAD + "\n\n" + "".join(sources))


def load_module(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(
    fn: Any, signature: dict[str, str], constants: dict[str, int], div: list[str], **options: Any
) -> Any:
    """Compile for sm_90. div names the arguments that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full = dict(signature) | dict.fromkeys(constants, "constexpr")
    names = list(fn.arg_names)
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in div}
    source = ASTSource(
        fn=fn, signature={n: full[n] for n in names}, constexprs=constants, attrs=attrs
    )
    options.setdefault("num_warps", 4)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def build_args(module: Any, count: int) -> Any:
    signature = {"o": "*i32", "x": "*i32"} | {f"a{i}": "i32" for i in range(count - 2)}
    fn = getattr(module, f"args{count}")
    return build(fn, signature, {"BLOCK": 128}, ["o", "x"])


def build_pointwise(path: str, index: int) -> float:
    """Compile kernel pw{index} of the module at path; its seconds, imports left out."""
    import triton  # noqa: F401

    module = load_module(pathlib.Path(path))
    start = time.perf_counter()
    signature = {"o": "*fp16", "x": "*fp16", "y": "*fp16", "n": "i32"}
    build(getattr(module, f"pw{index}"), signature, {"BLOCK": 1024}, ["o", "x", "y", "n"])
    return time.perf_counter() - start
