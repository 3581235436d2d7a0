"""Vector code for the CPU backend's decode kernel, written as LLVM IR for numba to compile.

Written out, because a page is too short a loop for a compiler that knows neither its length nor
that pools and sums do not overlap, and because bfloat16 and prefetching have no numba spelling.
Pointers are integers (addresses), strides are bytes, sums are float32. Channel counts are multiples
of `LANES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseengine.ops.native import I64, at

LANES = 16  # a power of two; wider than the machine's registers is legal, LLVM splits it
LINE = 64  # bytes of a cache line
_BLOCK = 4  # vectors that are summed side by side, to hide the latency of an addition

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), I64
_VECTOR = ir.VectorType(_F32, LANES)


def _load(b: Any, address: Any, half: bool) -> Any:
    """LANES channels as float32; bfloat16 is the upper half of a float32."""
    if not half:
        return b.load(at(b, address, _VECTOR), align=4)
    raw = b.load(at(b, address, ir.VectorType(_I16, LANES)), align=2)
    wide = b.zext(raw, ir.VectorType(_I32, LANES))
    shift = ir.Constant(ir.VectorType(_I32, LANES), [16] * LANES)
    return b.bitcast(b.shl(wide, shift), _VECTOR)


def _splat(b: Any, scalar: Any) -> Any:
    one = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _I32(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fn = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32")
    return b.call(fn, [x, y, z])


def _sum(b: Any, vector: Any) -> Any:
    """Sum of the lanes as a tree: halves are added until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        picks = ir.VectorType(_I32, width)
        low = b.shuffle_vector(vector, vector, ir.Constant(picks, list(range(width))))
        high = b.shuffle_vector(vector, vector, ir.Constant(picks, list(range(width, 2 * width))))
        vector = b.fadd(low, high)
    return b.extract_element(vector, _I32(0))


def _over_blocks(b: Any, dim: Any, body: Callable[[Any, int], None]) -> None:
    """body(first channel, vectors) over `dim` channels: _BLOCK vectors at a time, then single."""
    wide = _I64(_BLOCK * LANES)
    whole = b.mul(b.sdiv(dim, wide), wide)
    with cgutils.for_range_slice(b, _I64(0), whole, wide, _I64) as (first, _):
        body(first, _BLOCK)
    with cgutils.for_range_slice(b, whole, dim, _I64(LANES), _I64) as (first, _):
        body(first, 1)


def _bytes(b: Any, channels: Any, half: bool) -> Any:
    return b.mul(channels, _I64(2 if half else 4))


def _emit_dots(b: Any, args: Any, half: bool) -> None:
    query, keys, stride, count, dim, out, scale = args
    sums = [cgutils.alloca_once(b, _VECTOR) for _ in range(_BLOCK)]
    with cgutils.for_range(b, count, intp=_I64) as key:
        row = b.add(keys, b.mul(key.index, stride))
        for s in sums:
            b.store(ir.Constant(_VECTOR, [0.0] * LANES), s)

        def body(first: Any, vectors: int, row: Any = row) -> None:
            for i in range(vectors):
                channel = b.add(first, _I64(i * LANES))
                x = _load(b, b.add(query, _bytes(b, channel, False)), False)
                y = _load(b, b.add(row, _bytes(b, channel, half)), half)
                b.store(_fma(b, x, y, b.load(sums[i])), sums[i])

        _over_blocks(b, dim, body)
        left = b.fadd(b.load(sums[0]), b.load(sums[1]))
        total = _sum(b, b.fadd(left, b.fadd(b.load(sums[2]), b.load(sums[3]))))
        place = b.add(out, b.mul(key.index, _I64(4)))
        b.store(b.fmul(total, scale), at(b, place, _F32))


def _emit_weighted_sum(b: Any, args: Any, half: bool) -> None:
    weights, values, stride, count, dim, out = args

    def body(first: Any, vectors: int) -> None:
        base = b.add(out, _bytes(b, first, False))
        places = [at(b, b.add(base, _I64(4 * LANES * i)), _VECTOR) for i in range(vectors)]
        sums = [cgutils.alloca_once(b, _VECTOR) for _ in range(vectors)]
        for s, place in zip(sums, places, strict=True):
            b.store(b.load(place, align=4), s)
        with cgutils.for_range(b, count, intp=_I64) as key:
            place = b.add(weights, b.mul(key.index, _I64(4)))
            weight = _splat(b, b.load(at(b, place, _F32)))
            row = b.add(values, b.add(b.mul(key.index, stride), _bytes(b, first, half)))
            for i, s in enumerate(sums):
                vector = _load(b, b.add(row, _bytes(b, _I64(i * LANES), half)), half)
                b.store(_fma(b, weight, vector, b.load(s)), s)
        for s, place in zip(sums, places, strict=True):
            b.store(b.load(s), place, align=4)

    _over_blocks(b, dim, body)


def _dots(half: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def dots(
        typing: Any,
        query: Any,
        keys: Any,
        stride: Any,
        count: Any,
        dim: Any,
        out: Any,
        scale: Any,
    ) -> Any:
        """out[i] = scale * (query . keys[i]) for `count` rows."""
        sig = types.void(*[types.int64] * 6, types.float32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_dots(builder, args, half)
            return context.get_dummy_value()

        return sig, codegen

    return dots


def _weighted_sum(half: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def weighted_sum(
        typing: Any, weights: Any, values: Any, stride: Any, count: Any, dim: Any, out: Any
    ) -> Any:
        """out += sum of weights[i] * values[i] over `count` rows."""
        sig = types.void(*[types.int64] * 6)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_weighted_sum(builder, args, half)
            return context.get_dummy_value()

        return sig, codegen

    return weighted_sum


dots_f32, dots_bf16 = _dots(half=False), _dots(half=True)
weighted_sum_f32, weighted_sum_bf16 = _weighted_sum(half=False), _weighted_sum(half=True)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, address: Any, num_bytes: Any) -> Any:
    """Ask for the cache lines from an address on, into the second-level cache."""
    sig = types.void(types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range_slice(builder, _I64(0), args[1], _I64(LINE), _I64) as (at, _):
            line = builder.inttoptr(builder.add(args[0], at), pointer)
            builder.call(fn, [line, _I32(0), _I32(2), _I32(1)])  # read, level 2, data
        return context.get_dummy_value()

    return sig, codegen
