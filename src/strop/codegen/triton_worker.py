"""Compiles Triton text to machine code: a function, and a process that serves it over pipes.

Imports Triton and nothing of Strop or torch, so that a worker starts fast and stays small. As a
script it reads requests from stdin and writes replies to stdout until stdin closes; started by
path and not through ``multiprocessing``, it never runs the user's main module again.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import struct
import sys
import tempfile
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")


def jit_function(name: str, text: str) -> Any:
    """The ``@triton.jit`` function that ``text`` defines. Its source is known to ``inspect``."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"strop-{digest}/{name}.py"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"strop_{digest}"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name]


def compile_request(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Machine code and what a launch needs to know about it."""
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
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError("the kernel wants Triton's own scratch memory, which launches pass none")
    header = {
        "entry": metadata.name,
        "shared": metadata.shared,
        "num_warps": metadata.num_warps,
        "arch": request["arch"],
    }
    return header, compiled.asm["cubin"]


def write_message(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header | {"size": len(body)}).encode()
    stream.write(_LENGTH.pack(len(text)) + text + body)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next message, or None at the end of the stream."""
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    header = json.loads(stream.read(_LENGTH.unpack(length)[0]))
    return header, stream.read(header["size"])


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the other side closes. A failure is an answer too: the caller raises it."""
    import triton

    with tempfile.TemporaryDirectory(prefix="strop-triton-") as folder:
        triton.knobs.cache.dir = folder
        while message := read_message(requests):
            try:
                header, body = compile_request(message[0])
            except BaseException as error:  # any failure of a compiler belongs to its caller
                write_message(replies, {"error": f"{type(error).__name__}: {error}"})
                if not isinstance(error, Exception):
                    raise
            else:
                write_message(replies, header, body)


if __name__ == "__main__":
    # Compilers print to stdout; the replies keep the pipe for themselves.
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, pipe)
