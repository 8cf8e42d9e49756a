"""Data flows one way: which part of Strop may import which, read from the source with ``ast``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import strop

ROOT = Path(strop.__file__).parent

# A folder or file of src/strop -> what it may import besides itself. A name covers what is below.
# A stage sees the IR and the data type that it consumes, never another stage's code.
ALLOWED: dict[str, tuple[str, ...]] = {
    "__init__": ("api", "options", "train"),
    "__main__": ("cli",),
    "errors": (),
    "wording": (),
    "extensions": ("frontend.composed_tensors",),  # which classes of weights it can take apart
    "options": ("errors", "ir.device"),
    "ir": ("errors",),
    "frontend": ("errors", "options", "ir"),
    "passes": ("errors", "options", "ir"),
    "patterns": ("errors", "options", "wording", "ir", "frontend", "passes"),
    "fusion": ("errors", "options", "ir"),
    "lowering": ("errors", "options", "ir", "fusion.plan"),
    "codegen": ("errors", "options", "ir", "fusion.plan"),
    "backend": (
        "errors",
        "options",
        "ir",
        "passes",
        "patterns",
        "fusion",
        "lowering",
        "codegen",
        "stages",
    ),
    "stages": ("errors", "options", "ir", "fusion", "lowering", "codegen", "kernels"),
    "kernels": ("errors", "ir"),
    "runtime": ("errors", "options", "wording", "ir", "kernels", "codegen.triton_worker"),
    "dispatch": (  # from a call to a program: it traces, compiles, keeps and runs
        "errors",
        "options",
        "wording",
        "ir",
        "frontend",
        "backend",
        "codegen.assemble",
        "patterns.registry",
        "stages.targets",
        "runtime",
    ),
    "artefacts": (
        "errors",
        "options",
        "wording",
        "frontend.low_rank_layers",
        "ir.device",
        "ir.program",
        "ir.cards",
        "diffusion.parts",
        "diffusion.pipeline",
        "dispatch",
        "runtime",
    ),
    "api": (
        "errors",
        "options",
        "artefacts",
        "runtime.build.artefact",
        "patterns.declare",
        "dispatch.adapter_rows",
        "dispatch.changing",
        "dispatch.dispatcher",
        "dispatch.known_dispatchers",
        "dispatch.features",
        "dispatch.parallel",
        "dispatch.training",
        "dispatch.units",
        "diffusion",
        "debug.explain",
        "debug.report",
    ),
    "diffusion": (
        "errors",
        "options",
        "wording",
        "api",
        "ir.tensor_spec",
        "dispatch.adapter",
        "dispatch.changing",
        "dispatch.dispatcher",
        "dispatch.features",
        "dispatch.known_dispatchers",
        "dispatch.gc_pause",
        "dispatch.model_offload",
        "dispatch.parallel",
        "dispatch.step_cache",
        "frontend.module_parts",
        "runtime.loop.denoise_loop",
        "dispatch.signature",
    ),
    "models": (),
    "serve": ("__init__", "errors", "wording", "drawing"),
    "drawing": ("errors", "wording", "models.guidance"),
    "debug": (
        "errors",
        "options",
        "wording",
        "api",
        "backend",
        "ir",
        "kernels",
        "fusion.plan",
        "patterns",
        "dispatch",
        "runtime",
        "testing",
    ),
    "testing": ("errors", "options", "ir", "api"),
    "train": (
        "__init__",
        "errors",
        "options",
        "wording",
        "api",
        "models",
        "ir.dims",
        "ir.philox",
        "ir.source",
        "dispatch.gc_pause",
        "dispatch.gradient_edges",
        "dispatch.gradient_listeners",
        "runtime.build.loader",
        "runtime.run.graph_keep_alive",
        "runtime.run.group_shutdowns",
        "runtime.run.library_workspaces",
        "runtime.run.own_streams",
        "runtime.run.pinned_memory",
        "runtime.run.sizes",
        "runtime.run.weight_layout",
        "runtime.run.weight_stream",
        "dispatch.signature",
    ),
    "bench": (
        "__init__",
        "drawing",
        "serve",
        "errors",
        "options",
        "wording",
        "api",
        "dispatch.dispatcher",
        "ir.eight_bit",
        "runtime.run.growing_memory",
        "runtime.run.library_workspaces",
        "debug",
        "kernels",
        "models",
        "testing",
        "train",
    ),
    "cli": (
        "__init__",
        "errors",
        "options",
        "wording",
        "api",
        "artefacts",
        "bench",
        "debug",
        "diffusion.adapter_files",
        "diffusion.adapter_loading",
        "diffusion.snapshots",
        "drawing",
        "models",
        "serve",
        "dispatch",
        "runtime",
        "train",
    ),
}

# (file, what it imports) -> why the rule above does not fit it.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("backend", "dispatch.torch_compile"): "the entry point that torch knows; imported at the call",
    ("__init__", "dispatch.gc_pause"): "imports are quicker while no garbage is collected",
    ("dispatch.stored_variants", "__init__"): "__version__, a part of the key on disk",
    (
        "runtime.run.library_calls",
        "patterns.call",
    ): "the row of the table for calls of replacements",
    ("backend", "debug.dump"): "Options.dump; imported at the call",
    ("dispatch.entry_runner", "debug.check"): "Options.check; imported at the call",
    ("dispatch.dynamo", "debug.check"): "Options.check; imported at the call",
    ("debug.case", "codegen.assemble"): "Signature: the data that backend.py asks for",
    ("debug.dump", "codegen.assemble"): "Signature: the data that backend.py asks for",
    ("debug.bisect", "passes"): "the names of a device's passes, to disable them one by one",
    ("debug.failure", "__init__"): "where the package lies, to name the function that raised",
    ("debug.case", "__init__"): "__version__, noted in a dump",
    ("debug.ceilings", "bench.timer"): "times by the clock of the benchmarks",
    ("debug.step_times", "bench.timer"): "times by the clock of the benchmarks",
    ("bench.waits", "runtime.build.compilers"): "how many kernels somebody has waited for",
    ("bench.waits", "runtime.run.cuda_graphs"): "how many graphs have been captured",
    ("bench.infer_contenders", "runtime.run.layouts"): "bytes_of, of weights that several have",
    ("bench.census", "frontend.objects"): "as_tree, to compare results that are caches",
    (
        "bench.infer_variants",
        "runtime.build.compilers",
    ): "how long a call at a new size waited for kernels",
}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {name_of(file): file for file in ROOT.rglob("*.py")}


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of Strop that the code imports, without the leading ``strop.``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [d if d.removeprefix("strop.") in FILES else node.module for d in deeper]
        else:
            continue
        for name in found:
            if name.split(".")[0] == "strop":
                yield name.removeprefix("strop").removeprefix(".") or "__init__"


EDGES = {
    (name, target)
    for name, file in FILES.items()
    for target in imports(ast.parse(file.read_text()))
    if target.split(".")[0] != name.split(".")[0]
}


def is_allowed(name: str, target: str) -> bool:
    return any(f"{target}.".startswith(f"{rule}.") for rule in ALLOWED[name.split(".")[0]])


def test_every_part_has_a_rule() -> None:
    assert {name.split(".")[0] for name in FILES} <= ALLOWED.keys()


def test_imports_follow_the_rules() -> None:
    wrong = {e for e in EDGES - EXCEPTIONS.keys() if not is_allowed(*e)}
    assert not wrong, "\n".join(f"{a} must not import {b}" for a, b in sorted(wrong))


def test_exceptions_are_needed() -> None:
    unused = EXCEPTIONS.keys() - {e for e in EDGES if not is_allowed(*e)}
    assert not unused, f"take these rows out of EXCEPTIONS: {sorted(unused)}"


def test_compiler_and_runtime_load_without_debug() -> None:
    for name, file in FILES.items():
        if name.split(".")[0] in ("debug", "bench", "cli"):  # tools, which users start
            continue
        statements = ast.Module([n for n in ast.parse(file.read_text()).body if _is_import(n)], [])
        debug = [t for t in imports(statements) if t.split(".")[0] == "debug"]
        assert not debug, f"{name} imports {debug} when it is imported: do so in the function"


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)
