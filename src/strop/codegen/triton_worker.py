"""Compiles Triton text to machine code: a function, and a process that serves it over pipes.

Imports Triton and nothing of Strop or torch, so that a worker starts fast and stays small. As a
script it reads requests from stdin and writes replies to stdout until stdin closes; started by
path and not through ``multiprocessing``, it never runs the user's main module again.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import linecache
import os
import signal
import struct
import subprocess
import sys
import tempfile
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")
_COLLECT_EVERY = 64  # kernels; each leaves 1.5 MB in cycles, MLIR's modules among it


def jit_function(name: str, text: str) -> Any:
    """Return the ``@triton.jit`` function that ``text`` defines. Its source is known to
    ``inspect``."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"strop-{digest}/{name}.py"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"strop_{digest}"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name]


def compile_request(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return machine code and what a launch needs to know about it."""
    if request.get("language") == "ptx":
        return _assembled(request)
    runs_on = request.get("runs_on", request["arch"])
    compiled, code = _compiled(request) if runs_on == request["arch"] else _ported(request, runs_on)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError("the kernel wants Triton's own scratch memory, which launches pass none")
    header = {
        "entry": metadata.name,
        "shared": metadata.shared,
        "num_warps": metadata.num_warps,
        "arch": request["arch"],
        "early": request["constants"].get("EARLY") == 1,
        "boxes": _boxes(request["boxes"], metadata),
    }
    return header, code


def _compiled(request: dict[str, Any]) -> tuple[Any, bytes]:
    """Return what Triton makes of the text for ``arch``, and the machine code of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=jit_function(request["name"], request["text"]),
        signature=request["signature"],
        constexprs=request["constants"],
        attrs={(place,): [["tt.divisibility", 16]] for place in request["divisible"]},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", request["arch"], 32),
        options={"num_warps": request["num_warps"], "maxnreg": request["max_registers"]},
    )
    return compiled, compiled.asm["cubin"]


def _ported(request: dict[str, Any], runs_on: int) -> tuple[Any, bytes]:
    """The same, but the PTX for ``arch`` is assembled for the newer ``runs_on``. A stored result
    would have no PTX, so Triton compiles anew; what it stores is its own code for ``arch``."""
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.store_binary_only = False
        knobs.compilation.always_compile = True
        compiled, _ = _compiled(request)
    return compiled, _machine_code(compiled.asm["ptx"], runs_on, f"sm_{runs_on}")


def _assembled(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Assemble PTX by Triton's assembler. The request says which memory the launch gives it."""
    cubin = _machine_code(request["text"], request["arch"], f"sm_{request['arch']}a")
    header = {
        "entry": request["name"],
        "shared": request["constants"]["SHARED"],
        "num_warps": request["num_warps"],
        "arch": request["arch"],
        "early": request["constants"]["EARLY"] == 1,
        "boxes": request["boxes"],
    }
    return header, cubin


def _machine_code(ptx: str, arch: int, gpu_name: str) -> bytes:
    """PTX through the assembler that Triton has for this architecture."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory(prefix="strop-ptx-") as folder:
        text, code = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "kernel.cubin")
        with open(text, "w") as file:
            file.write(ptx)
        command = [tool.path, f"--gpu-name={gpu_name}", text, "-o", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        with open(code, "rb") as file:
            return file.read()


def _boxes(dtypes: list[Any], metadata: Any) -> list[list[Any] | None]:
    """Describe for each param what a tensor map says of the pieces that the kernel moves, which the
    compiler may have cut. Where it does not say, the kernel would have been given other
    arguments."""
    if not dtypes:
        return []
    found = iter(metadata.tensordesc_meta)
    return [
        (box := next(found)) and [box["block_size"], dtype, box["swizzle"]]
        if isinstance(dtype, int)
        else None
        for dtype in dtypes
    ]


def write_message(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header | {"size": len(body)}).encode()
    stream.write(_LENGTH.pack(len(text)) + text + body)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Return the next message, or None where the stream ends, be it in the middle of one."""
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    num_bytes = _LENGTH.unpack(length)[0]
    text = stream.read(num_bytes)
    if len(text) < num_bytes:
        return None
    header = json.loads(text)
    body = stream.read(header["size"])
    return (header, body) if len(body) == header["size"] else None


# Compiled when a process starts: it then has loaded, and asked ptxas for, what every kernel needs.
WARM_UP = {
    "name": "warm_up",
    "text": "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef warm_up(p0):\n"
    "    place = tl.arange(0, 32)\n"
    "    tl.store(p0 + place, tl.math.rsqrt(tl.load(p0 + place)))\n",
    "signature": {"p0": "*fp32"},
    "constants": {},
    "divisible": [0],
    "num_warps": 1,
    "max_registers": None,
    "arch": 90,
    "boxes": [],
}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the other side closes. A failure is an answer too: the caller raises it."""
    with tempfile.TemporaryDirectory(prefix="strop-triton-") as folder:
        _prepare(folder)
        gc.disable()  # collections, and taking modules apart one by one, are a tenth of the work
        num_served = 0
        while message := read_message(requests):
            try:
                header, body = compile_request(message[0])
            except Exception as error:  # any failure of a compiler belongs to its caller
                header, body = {"error": f"{type(error).__name__}: {error}"}, b""
            write_message(replies, header, body)
            num_served += 1
            if num_served % _COLLECT_EVERY == 0:
                gc.collect()


def _prepare(folder: str) -> None:
    """Take from Triton what nobody reads: its own cache lies in a folder that ends with us."""
    import triton
    import triton.runtime.cache

    tempfile.tempdir = triton.knobs.cache.dir = folder
    triton.knobs.compilation.store_binary_only = True
    # the text is in no file; machine code is the same without, and a third of the size
    triton.knobs.compilation.disable_line_info = True
    # a digest of all of Triton, 0.4 s: this process has only one
    triton.runtime.cache.triton_key = lambda: triton.__version__
    with contextlib.suppress(Exception):  # the first request fails likewise, and somebody hears it
        compile_request(WARM_UP)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # removes the folder
    # Compilers print to stdout; the replies keep the pipe for themselves.
    with os.fdopen(os.dup(1), "wb") as pipe, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)
        serve(sys.stdin.buffer, pipe)
