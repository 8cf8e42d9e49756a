"""``wgmma``: products that run beside their warps; and ``mma``, those of one warp.

A part of ``ptx_machine``. Four warps issue a product together; it runs at any time between the last
one's issue and the first one's wait. Till then its registers are locked and what it reads of shared
memory must stay. Known are operands in lines of 64 and 128 mixed bytes, of fp16, bf16 and e4m3,
with fp32 sums. Those of e4m3 have all bits here: how many Hopper keeps is not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tests.kernels.ptx_access import BLOCKED
from tests.kernels.ptx_arithmetic import of_half
from tests.kernels.ptx_groups import together
from tests.kernels.ptx_instruction import FULL, Array, Instruction, Maker, Run
from tests.kernels.ptx_memory import UNIT, mixed
from tests.kernels.ptx_text import LANES, Imm, PtxError, Reg, Vector

WARPS, ROWS, DEPTH = 4, 64, 16
LOCKED = 1 << LANES  # in the place of the lanes that have written a register
_FORM = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(?:k16\.f32\.(bf16|f16)\.(bf16|f16)"
    r"|k32\.f32\.(e4m3)\.(e4m3))$"
)
_LINES = {1: 128, 2: 64}  # bytes, by how lines are mixed
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@lru_cache(maxsize=4096)
def operand_units(descriptor: int, rows: int, is_across: bool) -> Array:
    """Numbers of units of 16 bytes of an operand: (rows, 2), or, where its lines are across the
    sum, (DEPTH, rows / 8)."""
    start = (descriptor & 0x3FFF) * 16
    leading, stride = (descriptor >> 16 & 0x3FFF) * 16, (descriptor >> 32 & 0x3FFF) * 16
    line = _LINES.get(descriptor >> 62)
    if line is None or descriptor >> 49 & 7:
        raise PtxError(
            f"descriptor {descriptor:#x}: only lines of 64 and 128 mixed bytes are known"
        )
    if start // line & 7:
        raise PtxError(f"an operand at {start}, which begins between groups of eight lines")
    within = start % line
    if is_across:
        if within or rows % 8 or line != 128:
            raise PtxError(f"an operand at {start}, which begins within a line")
        k, n = np.arange(DEPTH)[:, None], np.arange(rows // 8)[None]
        at = start + n // 8 * leading + k // 8 * stride + k % 8 * 128 + n % 8 * 16
    else:
        if within > line - 2 * DEPTH:
            raise PtxError(f"an operand at {start}, which ends behind its line")
        row, half = np.arange(rows)[:, None], np.arange(2)[None]
        at = start + row // 8 * stride + row % 8 * line + half * 16
    return mixed(at // UNIT, line)


def operand(memory: Any, units: Array, is_across: bool, kind: str) -> Array:
    """(rows, DEPTH) in fp32, or twice as many codes."""
    raw = memory.units[units.reshape(-1)]
    if kind == "e4m3":
        return E4M3[raw.view(np.uint8).reshape(len(units), -1)]
    found = of_half(kind, raw.view(np.uint16).reshape(len(units), -1))
    return found.T if is_across else found


_ROW, _COL = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2


@lru_cache(maxsize=64)
def sums_places(cols: int) -> tuple[Array, Array]:
    """Rows and columns, within sixteen rows, of a lane's sums: (cols / 2, 32)."""
    n = np.arange(cols // 2)[:, None]
    return _ROW + n // 2 % 2 * 8, _COL + n // 4 * 8 + n % 2


def fragment(raw: Array, kind: str) -> Array:
    """(16, DEPTH) of four registers of two halves: (4, 32); or (16, 2 DEPTH) of four codes each, as
    PTX's ISA lays them out (section "Register Fragments for wgmma.mma_async.m64nNk32": a lane has
    four neighbours of a row, of the row eight below, and of both sixteen further)."""
    if kind == "e4m3":
        return _fragment_of_codes(raw)
    halves = np.stack((raw & np.uint32(0xFFFF), raw >> np.uint32(16)), -1).astype(np.uint16)
    found = np.empty((16, DEPTH), np.float32)
    n = np.arange(4)[:, None, None]
    rows = _ROW[None, :, None] + n % 2 * 8
    cols = _COL[None, :, None] + n // 2 * 8 + np.arange(2)
    found[rows, cols] = of_half(kind, halves)
    return found


def _fragment_of_codes(raw: Array) -> Array:
    found = np.empty((16, 2 * DEPTH), np.float32)
    n, byte = np.arange(4)[:, None, None], np.arange(4)
    rows = np.broadcast_to(_ROW[None, :, None] + n % 2 * 8, (4, LANES, 4))
    cols = 2 * _COL[None, :, None] + n // 2 * 16 + byte
    found[rows, cols] = E4M3[raw[..., None] >> (8 * byte).astype(np.uint32) & np.uint32(0xFF)]
    return found


class Product:
    """One, of a group of warps."""

    def __init__(self, group: WarpGroup, code: Instruction, given: tuple[int, ...]) -> None:
        self.group, self.code, self.given = group, code, given
        self.place, self.issued = len(group.products), 0

    def read(self, w: Any, units: Array) -> None:
        flat = units.reshape(-1)
        self.group.shared.read_units(w, flat)
        self.group.shared.history.note_product(self.group.slot, self.place + 1, flat)


class WarpGroup:
    def __init__(self, machine: Any, warps: list[Any], shared: Any) -> None:
        self.machine, self.warps, self.shared = machine, warps, shared
        self.products = list[Product]()
        self.done, self.slot = 0, warps[0].cta.cluster.slots.new()

    def run_to(self, count: int) -> None:
        while self.done < count:
            product = self.products[self.done]
            product.code.calculate(self, product)
            self.done += 1


def _flag(operand_: Any, allowed: tuple[int, ...]) -> int:
    if not isinstance(operand_, Imm) or operand_.value not in allowed:
        raise PtxError(f"a constant of {allowed} is wanted")
    return int(operand_.value)


def _registers(operand_: Any, count: int) -> tuple[Reg, ...]:
    if not isinstance(operand_, Vector) or len(operand_.items) != count:
        raise PtxError(f"{count} registers are wanted")
    found = tuple(each for each in operand_.items if isinstance(each, Reg) and each.bits == 32)
    if len(found) != count or len(set(found)) != count:
        raise PtxError(f"{count} different registers of 32 bits are wanted")
    return found


def make_product(maker: Maker, code: Instruction) -> Run:
    """Flags: whether sums are added to, signs, and which operands lie across the sum."""
    found = _FORM.match(".".join(maker.words))
    if not found:
        raise PtxError("form of wgmma not known")
    halves, codes = (found[2], found[3]), (found[4], found[5])
    if halves[0] != halves[1] or int(found[1]) % 8 or not 8 <= int(found[1]) <= 256:
        raise PtxError("form of wgmma not known")
    cols, kind, args = int(found[1]), halves[0] or codes[0], maker.statement.args
    is_shared = len(args) > 1 and not isinstance(args[1], Vector)
    into, a, b, adds, *flags = maker.args(6 if codes[0] else 8 if is_shared else 7)
    signs = _flag(flags[0], (-1, 1)) * _flag(flags[1], (-1, 1))
    across = flags[2:]  # only halves may lie across the sum
    a_across = bool(_flag(across[0], (0, 1))) if is_shared and across else False
    b_across = bool(_flag(across[-1], (0, 1))) if across else False
    code.accumulators = _registers(into, cols // 2)
    code.fragments = () if is_shared else _registers(a, 4)
    code.uses = (*((reg, cols) for reg in code.accumulators), *((reg, 0) for reg in code.fragments))
    descriptors = [maker.src(each, "b64") for each in ((a, b) if is_shared else (b,))]
    added = maker.pred(adds)
    code.calculate = _calculation(code, cols, kind, signs, (a_across, b_across))

    def run(w: Any, m: int) -> None:
        if m != FULL:
            raise PtxError("some lanes of the warp have ended")
        given = tuple(_uniform(source(w)) for source in descriptors)
        flag = added(w)
        if flag not in (0, FULL):
            raise PtxError("warps do not agree whether to add")
        product = _issued(w, code, (*given, flag))
        if is_shared:
            product.read(w, operand_units(given[0], ROWS, a_across))
        product.read(w, operand_units(given[-1], cols, b_across))
        _lock(w, code, bool(flag))
        product.issued |= 1 << w.number % WARPS
        w.open.append(product)
        if product.issued == (1 << WARPS) - 1:
            group, count = w.group, len(w.group.products)
            w.machine.touch()
            w.machine.perhaps_now(lambda: group.run_to(count))

    return run


def _uniform(values: Array) -> int:
    if (values != values[0]).any():
        raise PtxError("a warp's lanes have different descriptors")
    return int(values[0])


def _issued(w: Any, code: Instruction, given: tuple[int, ...]) -> Product:
    """All four warps issue the same products in the same order."""
    products: list[Product] = w.group.products
    if w.issued == len(products):
        products.append(Product(w.group, code, given))
    product: Product = products[w.issued]
    if product.code is not code or product.given != given:
        raise PtxError(
            f"another warp of this group has issued {product.code.statement.text!r}, "
            "or with other descriptors"
        )
    w.issued += 1
    return product


def _lock(w: Any, code: Instruction, is_added: bool) -> None:
    if not w.epoch:
        raise PtxError("no wgmma.fence before the first product")
    for reg, use in code.uses:
        if w.touched[reg.number] == w.epoch:
            raise PtxError(f"no wgmma.fence between an access to {reg.name} and this")
        if w.ok[reg.number] == LOCKED and w.uses[reg.number] != use:
            raise PtxError(f"{reg.name} belongs to a product of another shape")
    for reg in code.fragments if not is_added else (*code.fragments, *code.accumulators):
        if w.ok[reg.number] not in (FULL, LOCKED):
            raise PtxError(f"{reg.name} was not written")
    for reg, use in code.uses:
        w.uses[reg.number], w.ok[reg.number] = use, LOCKED


def _calculation(
    code: Instruction, cols: int, kind: str, sign: int, across: tuple[bool, bool]
) -> Callable[[WarpGroup, Product], None]:
    sums = np.array([reg.index for reg in code.accumulators])
    fragments = np.array([reg.index for reg in code.fragments])
    rows, columns = sums_places(cols)

    def run(group: WarpGroup, product: Product) -> None:
        *given, added = product.given
        b = operand(group.shared, operand_units(given[-1], cols, across[1]), across[1], kind)
        if code.fragments:
            a = np.concatenate([fragment(w.raw[fragments], kind) for w in group.warps])
        else:
            a = operand(group.shared, operand_units(given[0], ROWS, across[0]), across[0], kind)
        found = (a @ b.T) * np.float32(sign)
        for n, w in enumerate(group.warps):
            own = found[16 * n : 16 * n + 16][rows, columns]
            w.floats[sums] = w.floats[sums] + own if added else own

    return run


_WARP_FORM = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32$")


def make_warp_product(maker: Maker) -> Run:
    """d = a @ b + c, of 16 rows and eight columns. b has a lane's pairs along the sum."""
    found = _WARP_FORM.match(".".join(maker.words))
    if not found:
        raise PtxError("form of mma not known")
    together(maker)
    kind, args = found[1], maker.args(4)
    for each, count in zip(args, (4, 4, 2, 4), strict=True):
        _registers(each, count)
    sums = [maker.dst(each, "f32")[1] for each in args[0].items]
    a, b, c = ([maker.src(each, "b32") for each in operand_.items] for operand_ in args[1:])
    rows, columns = sums_places(8)

    def run(w: Any, m: int) -> None:
        if m != FULL:
            raise PtxError("some lanes of the warp have ended")
        left = fragment(np.stack([source(w) for source in a]), kind)
        none = np.zeros(LANES, np.uint32)  # rows of b that there are not
        first, second = (source(w) for source in b)
        right = fragment(np.stack((first, none, second, none)), kind)[:8]
        before = np.stack([source(w) for source in c]).view(np.float32)
        w.floats[sums] = (left @ right.T)[rows, columns] + before

    return run


def _fence(maker: Maker) -> Run:
    def run(w: Any, m: int) -> None:
        w.epoch += 1

    return run


def _commit(maker: Maker) -> Run:
    def run(w: Any, m: int) -> None:
        w.committed.append(w.open)
        w.open = []

    return run


def _wait(maker: Maker) -> Run:
    (operand_,) = maker.args(1)
    left = _flag(operand_, tuple(range(8)))

    def run(w: Any, m: int) -> Any:
        done = w.committed[: max(len(w.committed) - left, 0)]
        products = [product for group in done for product in group]
        if any(product.issued != (1 << WARPS) - 1 for product in products):
            return BLOCKED
        if products:
            w.group.run_to(products[-1].place + 1)
        del w.committed[: len(done)]
        _unlock(w, products)
        return None

    return run


def _unlock(w: Any, products: list[Product]) -> None:
    if products:
        w.clock[w.group.slot] = products[-1].place + 1
    still = {product.code for group in (*w.committed, w.open) for product in group}
    locked = {reg.number for code in still for reg, _ in code.uses}
    for code in {product.code for product in products}:
        for reg, _ in code.uses:
            if reg.number not in locked:
                w.ok[reg.number] = FULL


MAKERS: dict[str, Callable[[Maker], Run]] = {
    "fence": _fence,
    "commit_group": _commit,
    "wait_group": _wait,
}
