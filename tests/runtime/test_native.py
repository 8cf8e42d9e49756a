"""Building, caching and calling C++ kernels."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop.codegen.cpp import emit
from strop.errors import CodegenError
from strop.ir.source import KernelSource
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels


def double_of(name: str, factor: float) -> KernelSource:
    text = f"""#include "vmath.h"

extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{
  float* const p0 = static_cast<float*>(buffers[0]);
  for (int64_t i = 0; i < scalars[0]; ++i) {{
    p0[i] *= {factor}f;
  }}
}}
"""
    return KernelSource(name, "cpp", text, (torch.float32,), (1,))


TWICE, THRICE = double_of("scale", 2.0), double_of("scale", 3.0)


@pytest.fixture
def store(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


def test_kernels_of_one_name_live_together(store: DiskCache):
    native = NativeKernels(store)
    built = native.build([TWICE, THRICE, TWICE])
    assert set(built) == {TWICE, THRICE}
    for source, factor in ((TWICE, 2), (THRICE, 3)):
        x = torch.ones(5)
        built[source].bind([x.data_ptr()], [4])()
        assert x.tolist() == [factor] * 4 + [1]
    assert (native.num_built, native.num_cached) == (2, 0)


def test_nothing_is_built_twice(store: DiskCache):
    native = NativeKernels(store)
    first = native.build([TWICE])
    assert native.build([TWICE])[TWICE] is first[TWICE]
    assert (native.num_built, native.num_cached) == (1, 0)


def test_what_many_programs_have_is_the_same_shared_object_for_all(tmp_path: Path):
    """A text as long as those that are written by hand; one beside others depends on them."""
    written = replace(TWICE, text=TWICE.text + "// no more\n" * 2000)
    places: dict[KernelSource, set[str]] = {written: set(), TWICE: set()}
    for more in ([THRICE], [double_of("scale", 4.0), double_of("scale", 5.0)]):
        native = NativeKernels(DiskCache(tmp_path / str(len(more))))
        native.make([written, TWICE, *more])
        for source, found in places.items():
            found.add(native.place(source)[0].name)
    assert len(places[written]) == 1
    assert not places[written] & places[TWICE]


def test_a_hit_needs_no_compiler(store: DiskCache):
    NativeKernels(store).build([TWICE, THRICE])
    native = NativeKernels(store, compiler="no-such-compiler")
    x = torch.ones(3)
    native.build([THRICE])[THRICE].bind([x.data_ptr()], [3])()
    assert x.tolist() == [3, 3, 3]
    assert (native.num_built, native.num_cached) == (0, 1)


def test_a_missing_compiler_is_named(store: DiskCache):
    with pytest.raises(
        CodegenError, match=r"no-such-compiler was not found.*apt-get install g\+\+"
    ):
        NativeKernels(store, compiler="no-such-compiler").build([TWICE])


def test_a_refused_kernel_is_kept(store: DiskCache):
    broken = replace(TWICE, text=TWICE.text.replace("*= 2.0f", "*= nonsense"))
    with pytest.raises(CodegenError, match=r"nonsense.* was not declared") as caught:
        NativeKernels(store).build([broken])
    (kept,) = (store.root / "refused").iterdir()
    assert str(kept) in str(caught.value)
    assert "nonsense" in kept.read_text()


def broken_compiler(folder: Path, fails_at: str) -> str:
    """A g++ with a fault of its own at some levels."""
    path = folder / "broken-g++"
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in {fails_at}) echo "internal compiler error: in a pass" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    path.chmod(0o700)
    return str(path)


def test_a_fault_of_the_compiler_is_met_by_a_lower_level_and_said(
    store: DiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    compiler = broken_compiler(tmp_path, "-O3|-O2")
    x = torch.ones(3)
    NativeKernels(store, compiler).build([TWICE])[TWICE].bind([x.data_ptr()], [3])()
    assert x.tolist() == [2, 2, 2]
    (line,) = caplog.messages
    assert "had an internal error, and compiled with -O1 instead of -O3: scale" in line


def test_a_compiler_with_a_fault_at_every_level_is_refused(store: DiskCache, tmp_path: Path):
    with pytest.raises(CodegenError, match="internal compiler error"):
        NativeKernels(store, broken_compiler(tmp_path, "-O*")).build([TWICE])


def test_what_is_made_for_another_processor_is_not_loaded(store: DiskCache):
    native = NativeKernels(store, target="cpu-v1")
    native.make([TWICE, THRICE])
    native.make([TWICE])
    assert native.num_built == 2
    assert not native._libraries
    path, symbol = native.place(TWICE)
    assert symbol.startswith("scale_")
    assert path.is_file()


def test_a_damaged_shared_object_is_built_again(store: DiskCache):
    NativeKernels(store).build([TWICE])
    (library,) = (store.root / "so").iterdir()
    # A new file: this process still maps the old one.
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:-100])
    native = NativeKernels(store)
    native.build([TWICE])
    assert (native.num_built, native.num_cached) == (1, 0)


def test_a_pruned_shared_object_is_built_again(store: DiskCache):
    NativeKernels(store).build([TWICE])
    store.prune(0)
    native = NativeKernels(store)
    native.build([TWICE])
    assert native.num_built == 1


def test_the_key_covers_flags_and_header(store: DiskCache, monkeypatch: pytest.MonkeyPatch):
    NativeKernels(store).build([TWICE])
    monkeypatch.setattr("strop.runtime.build.native.target_flags", lambda _: ("-march=x86-64",))
    native = NativeKernels(store)
    native.build([TWICE])
    assert native.num_built == 1


def test_pointers_can_be_redirected(store: DiskCache):
    bound_to, other = torch.ones(2), torch.ones(2)
    call = NativeKernels(store).build([TWICE])[TWICE].bind([bound_to.data_ptr()], [2])
    call()
    call.pointers[0] = other.data_ptr()
    call.scalars[0] = 1
    call()
    assert bound_to.tolist() == [2, 2]
    assert other.tolist() == [2, 1]


def test_threads_may_share_it(store: DiskCache):
    native = NativeKernels(store)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(native.build([TWICE])[TWICE]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
    assert native.num_built == 1


def test_generated_kernels_run(store: DiskCache):
    sample = kernels.silu_flat(torch.float32)
    emitted = emit(sample.kernel)
    x, out = sample.tensors({"n": 9})
    function = NativeKernels(store).build([emitted.source])[emitted.source]
    scalars = [expr.eval({"n": 9}) for expr in emitted.scalars]
    function.bind([x.data_ptr(), out.data_ptr()], scalars)()
    torch.testing.assert_close(out, torch.nn.functional.silu(x))
