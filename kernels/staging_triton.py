"""Triton kernels of `staging`: one launch for all tensors of a call.

A launch reads a table of int64 on the device: the index of the first program of each tensor, padded to a power of two
with an index that no program has, then COLUMNS numbers per tensor. A program finds its tensor by counting the first
indices up to its own. The exact kernels move words as wide as all addresses and strides allow, up to 16 bytes per
thread and access; the quantising kernels move values, whole groups per program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from memo.errors import UsageError
from memo.kernels.codec import ALIGNMENT, GROUP, LARGEST, SMALLEST, Codec
from memo.kernels.staging import staging_offsets
from memo.kernels.strided_runs import Runs, runs_of

__all__ = ["COLUMNS", "pack", "unpack"]

# Columns of a tensor's row in the table.
VIEW = tl.constexpr(0)  # address of its first value
BLOCK = tl.constexpr(1)  # address of its payload in the staging block
SCALES = tl.constexpr(2)  # address of its scales there
RUN = tl.constexpr(3)  # length of a run, in words or values
STRIDE = tl.constexpr(4)  # distance between runs, in words or values
COUNT = tl.constexpr(5)  # total words or values
PER_RUN = tl.constexpr(6)  # programs per run
COLUMNS = tl.constexpr(7)

NO_PROGRAM = 1 << 62
WORDS = 2048  # per program: 16 KiB of the widest words
FEW_WORDS = 128  # where no run is longer; only two sizes, since each is compiled separately
LEAST_ROOM = 8  # least tensors of a table, for the same reason
GROUPS = 32  # per program: two 16-byte accesses per thread for bfloat16
GROUP_OF_VALUES = tl.constexpr(GROUP)
SMALLEST_OF_GROUP = tl.constexpr(SMALLEST)
LARGEST_OF_GROUP = tl.constexpr(LARGEST)

# (x + ROUNDS) - ROUNDS is x rounded to an integer, ties to even, for |x| below 2^22.
ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _row_of(table, program, TENSORS: tl.constexpr):
    """Table row of this program's tensor, and the index of the program among that tensor's."""
    firsts = tl.load(table + tl.arange(0, TENSORS))
    tensor = tl.sum((firsts <= program).to(tl.int32), axis=0) - 1
    return table + TENSORS + tensor * COLUMNS, program - tl.load(table + tensor)


@triton.jit
def _copy_kernel(
    table, TENSORS: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr, PACKS: tl.constexpr
):
    """Computes block[row * run + i] = view[row * stride + i] (PACKS), or the reverse."""
    row, program = _row_of(table, tl.program_id(0).to(tl.int64), TENSORS)
    run, stride, per_run = tl.load(row + RUN), tl.load(row + STRIDE), tl.load(row + PER_RUN)
    begin = (program // per_run) * stride
    packed = (program // per_run) * run
    if ALIGNED:
        begin = tl.multiple_of(begin, 2)
        packed = tl.multiple_of(packed, 2)
    view = tl.load(row + VIEW).to(tl.pointer_type(WORD)) + begin
    block = tl.load(row + BLOCK).to(tl.pointer_type(WORD)) + packed
    if ALIGNED:
        view = tl.multiple_of(view, 16)
        block = tl.multiple_of(block, 16)
        run = tl.multiple_of(run, 2)
    i = (program % per_run) * SIZE + tl.arange(0, SIZE)
    if PACKS:
        tl.store(block + i, tl.load(view + i, mask=i < run), mask=i < run)
    else:
        tl.store(view + i, tl.load(block + i, mask=i < run), mask=i < run)


@triton.jit
def _to_e4m3(x):
    """Nearest e4m3 code of |x| <= 448, ties to even, in integer arithmetic: sm_80 has no instruction for it."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((tl.abs(x) * 512.0 + ROUNDS) - ROUNDS).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3(code):
    magnitude = (code & 0x7F).to(tl.int32)
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -value, value)


@triton.jit
def _groups(row, program, EVEN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Indices for SIZE groups: each value's index in view and payload and its mask; each group's index and its mask.

    EVEN: no group crosses from one run to the next, so a program stays in one run and divides once instead of per
    value.
    """
    run, stride, count, per_run = (
        tl.load(row + RUN),
        tl.load(row + STRIDE),
        tl.load(row + COUNT),
        tl.load(row + PER_RUN),
    )
    within = tl.arange(0, GROUP_OF_VALUES)[None, :]
    if EVEN:
        number = program // per_run
        group = (program % per_run) * SIZE + tl.arange(0, SIZE)
        i = group[:, None] * GROUP_OF_VALUES + within
        begin, packed = number * stride, number * run
        if ALIGNED:
            begin = tl.multiple_of(begin, 16)
            packed = tl.multiple_of(packed, 16)
            run = tl.multiple_of(run, 16)
        return begin + i, packed + i, i < run, number * (run // GROUP_OF_VALUES) + group, group * GROUP_OF_VALUES < run
    group = program * SIZE + tl.arange(0, SIZE)
    i = group[:, None] * GROUP_OF_VALUES + within
    return (i // run) * stride + i % run, i, i < count, group, group * GROUP_OF_VALUES < count


@triton.jit
def _address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer in a column of the table."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _encode_kernel(
    table, TENSORS: tl.constexpr, VALUE: tl.constexpr, INT8: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Encodes SIZE groups: amax' = max(amax, SMALLEST); scale = amax' / top; payload = code(x * (top / amax'))."""
    row, program = _row_of(table, tl.program_id(0).to(tl.int64), TENSORS)
    where, packed, inside, group, exists = _groups(row, program, EVEN, ALIGNED, SIZE)
    x = tl.load(_address(row, VIEW, VALUE, ALIGNED) + where, mask=inside, other=0.0).to(tl.float32)
    unfit = tl.max((~(tl.abs(x) <= LARGEST_OF_GROUP)).to(tl.int32), axis=1) > 0
    x = tl.where(unfit[:, None], 0.0, x)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST_OF_GROUP)
    top = tl.full((SIZE,), 127.0 if INT8 else 448.0, tl.float32)
    scaled = x * tl.div_rn(top, amax)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -top[:, None]), top[:, None])
    if INT8:
        code = ((scaled + ROUNDS) - ROUNDS).to(tl.int32).to(tl.uint8)
    else:
        code = _to_e4m3(scaled)
    tl.store(_address(row, BLOCK, tl.uint8, ALIGNED) + packed, code, mask=inside)
    scale = tl.where(unfit, float("nan"), tl.div_rn(amax, top))
    tl.store(_address(row, SCALES, tl.float32, ALIGNED) + group, scale, mask=exists)


@triton.jit
def _decode_kernel(
    table, TENSORS: tl.constexpr, VALUE: tl.constexpr, INT8: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Decodes SIZE groups: x = value(payload) * scale."""
    row, program = _row_of(table, tl.program_id(0).to(tl.int64), TENSORS)
    where, packed, inside, group, exists = _groups(row, program, EVEN, ALIGNED, SIZE)
    code = tl.load(_address(row, BLOCK, tl.uint8, ALIGNED) + packed, mask=inside, other=0)
    scale = tl.load(_address(row, SCALES, tl.float32, ALIGNED) + group, mask=exists, other=0.0)
    if INT8:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        value = _from_e4m3(code)
    x = value * scale[:, None]
    tl.store(_address(row, VIEW, VALUE, ALIGNED) + where, x.to(VALUE), mask=inside)


def pack(views: Sequence[torch.Tensor], staging: torch.Tensor, codec: Codec) -> None:
    """Implements `staging.pack_views`."""
    _launch(views, staging, codec, packs=True)


def unpack(staging: torch.Tensor, views: Sequence[torch.Tensor], codec: Codec) -> None:
    """Implements `staging.unpack_views`."""
    _launch(views, staging, codec, packs=False)


def _launch(views: Sequence[torch.Tensor], staging: torch.Tensor, codec: Codec, *, packs: bool) -> None:
    placed = [
        (view, offset) for view, (offset, _) in zip(views, staging_offsets(views, codec), strict=True) if view.numel()
    ]
    if not placed:
        return
    if codec is Codec.EXACT:
        _copy(placed, staging, packs=packs)
        return
    kinds = {(view.dtype, _is_even(runs_of(view))) for view, _ in placed}
    for dtype, even in sorted(kinds, key=str):
        alike = [item for item in placed if (item[0].dtype, _is_even(runs_of(item[0]))) == (dtype, even)]
        _code(alike, staging, codec, dtype, even, packs=packs)


def _is_even(runs: Runs) -> bool:
    """True if no group crosses from one run to the next."""
    return runs.rows == 1 or runs.run % GROUP == 0


def _copy(placed: Sequence[tuple[torch.Tensor, int]], staging: torch.Tensor, *, packs: bool) -> None:
    runs = [_in_bytes(view) for view, _ in placed]
    addresses = [address for view, offset in placed for address in (view.data_ptr(), staging.data_ptr() + offset)]
    grain = _grain(addresses + [number for one in runs for number in (one.run, one.stride if one.rows > 1 else 0)])
    width = min(grain, 8)
    size = WORDS if max(one.run for one in runs) > FEW_WORDS * width else FEW_WORDS
    rows, programs = [], []
    for (view, offset), one in zip(placed, runs, strict=True):
        per_run = -(-one.run // (width * size))
        address = staging.data_ptr() + offset
        counts = (one.run // width, one.stride // width, one.count // width, per_run)
        rows.append([view.data_ptr(), address, 0, *counts])
        programs.append(one.rows * per_run)
    word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[width]
    table, tensors = _table(rows, programs, staging.device)
    warps = 8 if size == WORDS else 4
    _copy_kernel[(sum(programs),)](table, tensors, word, grain == ALIGNMENT, size, packs, num_warps=warps)


def _code(
    placed: Sequence[tuple[torch.Tensor, int]],
    staging: torch.Tensor,
    codec: Codec,
    dtype: torch.dtype,
    even: bool,
    *,
    packs: bool,
) -> None:
    rows, programs, numbers = [], [], [staging.data_ptr()]
    for view, offset in placed:
        one, address = runs_of(view), staging.data_ptr() + offset
        per_run = -(-one.run // (GROUP * GROUPS))
        rows.append(
            [
                view.data_ptr(),
                address,
                address + codec.scales_offset(one.count),
                one.run,
                one.stride,
                one.count,
                per_run,
            ]
        )
        programs.append(one.rows * per_run if even else -(-one.count // (GROUP * GROUPS)))
        # ALIGNED promises addresses that are multiples of 16 bytes, and runs and strides of 16 values.
        numbers += [view.data_ptr(), one.run, one.stride if one.rows > 1 else 0]
    value = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    table, tensors = _table(rows, programs, staging.device)
    kernel = _encode_kernel if packs else _decode_kernel
    aligned = even and _grain(numbers) == ALIGNMENT
    kernel[(sum(programs),)](table, tensors, value, codec is Codec.INT8, even, aligned, GROUPS, num_warps=8)


def _in_bytes(view: torch.Tensor) -> Runs:
    one = runs_of(view)
    return Runs(rows=one.rows, run=one.run * view.itemsize, stride=one.stride * view.itemsize)


def _grain(numbers: Sequence[int]) -> int:
    """Widest word, in bytes, of which all numbers are multiples."""
    width = ALIGNMENT
    while any(number % width for number in numbers):
        width //= 2
    return width


def _table(rows: Sequence[Sequence[int]], programs: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
    """Table on the device, and the number of tensors it has room for."""
    if sum(programs) >= 1 << 31:
        raise UsageError(f"{sum(programs)} programs in one launch, more than 2^31 - 1; pack fewer tensors at a time")
    room = max(LEAST_ROOM, triton.next_power_of_2(len(rows)))
    firsts = [sum(programs[:number]) for number in range(len(rows))] + [NO_PROGRAM] * (room - len(rows))
    flat = torch.tensor([*firsts, *(number for row in rows for number in row)], dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        flat = flat.pin_memory()  # a copy from pageable memory would wait for the stream
    return flat.to(device, non_blocking=True), room
