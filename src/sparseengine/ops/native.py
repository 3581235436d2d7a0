"""What compiled CPU kernels share: addresses, tickets, torch's own threads.

Kernels take addresses and byte strides as integers: a call costs under a microsecond, where a call
that unpacks arrays costs several. Threads are those of the OpenMP library that torch runs on; a
second pool would fight it for the cores.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I64 = ir.IntType(64)
FAST_MATH = {"nsz", "arcp", "contract", "reassoc", "afn"}  # no assumption that numbers are finite
JIT: dict[str, Any] = {
    "cache": True,
    "error_model": "numpy",
    "nogil": True,
    "fastmath": FAST_MATH,
}
FAR = 1 << 40  # the length of an array whose bounds only its user knows


def at(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to `kind`, in the code of an intrinsic."""
    return builder.inttoptr(address, kind.as_pointer())


def _pointer(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def cast(typing: Any, address: Any) -> Any:
        sig = types.CPointer(kind)(types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return sig, codegen

    return cast


as_f32 = _pointer(types.float32)
as_f64 = _pointer(types.float64)
as_i32 = _pointer(types.int32)
as_i64 = _pointer(types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def take_ticket(typing: Any, counter: Any) -> Any:
    """Atomically add 1 to the int64 at an address; returns the value before."""
    sig = types.int64(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", at(builder, args[0], I64), I64(1), "monotonic")

    return sig, codegen


@cache
def openmp_parallel() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of torch's OpenMP library, or None."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        try:
            parallel = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None
