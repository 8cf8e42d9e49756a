"""A program as text: one line a step, in execution order."""

from __future__ import annotations

from strop.ir.program import Buffer, CallStep, Program, Step


def listing(program: Program) -> str:
    return "\n".join(_line(program, number, step) for number, step in enumerate(program.steps))


def _line(program: Program, number: int, step: Step) -> str:
    if isinstance(step, CallStep):
        target = dict(step.attrs).get("target", step.op) if step.op == "aten" else step.op
        made = [_buffer(program.buffers[n], n) for n in step.outputs if n >= 0]
        read = [_buffer(program.buffers[r.buffer], r.buffer) for r in step.inputs]
        what = f"call   {target}"
    else:
        made = [_buffer(program.buffers[n], n) for n in step.writes]
        read = [_buffer(program.buffers[n], n) for n in step.buffers if n not in step.writes]
        what = f"kernel {program.sources[step.kernel].name}"
    return f"{number:4d} {what}({', '.join(read)}) -> {', '.join(made)}  # {step.origin}"


def _buffer(buffer: Buffer, number: int) -> str:
    dtype = str(buffer.dtype).removeprefix("torch.")
    sizes = ", ".join(map(str, buffer.shape))
    return f"{buffer.kind}{number}:{dtype}[{sizes}]"
