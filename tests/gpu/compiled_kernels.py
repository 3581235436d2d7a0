"""Gluon kernels compile for the devices that they serve, of which none is needed; the interpreter
cannot run them. The kernel of sparse prefill keeps what makes it fast. Run by
tests/unit/test_kernels.py in a process of its own."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from triton.experimental.gluon._runtime import GluonASTSource

from sparseengine.ops.triton import blocks, latent_wgmma
from sparseengine.ops.triton.attention import PREFILL

POINTERS = {
    "table": "*i32", "starts": "*i64", "widths": "*i64", "lens": "*i32", "part": "*fp32",
    "lse": "*fp32", "meta": "*i32",
}  # fmt: skip
STRIDES = ("_st", "_sh", "_sn", "_sp")  # of tokens, heads, pages and slots
SHARED_BYTES = 233_472  # of a multiprocessor, which keeps 1,024 for itself per program


@pytest.mark.parametrize(("heads", "dtype"), [(20, "bf16"), (128, "fp16")])
def test_latent_decode(heads: int, dtype: str) -> None:
    kernel = latent_wgmma._latent_kernel
    block = latent_wgmma._heads_at_once(heads)
    tuning = latent_wgmma._TUNINGS[block]
    facts = {
        "HEADS": heads, "TILES": -(-heads // block), "VDIM": 512, "ROPE": 64, "PAGE": 16,
        "BLOCK_M": block, "TILE": latent_wgmma._TILE, "STAGES": tuning.stages,
        "SPANS": latent_wgmma._SPANS, "LEAST": 2, "PACKED": True, "SOFTCAP": False, "LAG": 8.0,
    }  # fmt: skip
    pointers = POINTERS | dict.fromkeys(("q", "pool", "out"), f"*{dtype}")
    aligned = {"q", "pool", "out", "part", "q_st", "q_sh", "o_st", "o_sh", "pool_sn", "pool_sp"}
    names = [p.name for p in kernel.params]
    floats = dict.fromkeys(("scale", "cap"), "fp32") | dict.fromkeys(facts, "constexpr")
    signature = {n: (pointers | floats).get(n, "i32") for n in names}
    constants = {(i,): facts[n] for i, n in enumerate(names) if n in facts}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    built = triton.compile(
        GluonASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tuning.warps},
    )
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert "cp.async.cg.shared.global" in built.asm["ptx"]
    assert tuning.programs * (built.metadata.shared + 1024) <= SHARED_BYTES


def test_masked_prefill() -> None:
    """Warpgroup products, and keys and values copied ahead, though a list says which."""
    kernel = blocks._masked_kernel
    facts = {
        "GROUP": 4, "DIM": 128, "BLOCK_D": 128, "VDIM": 128, "BLOCK_V": 128, "PAGE": 16,
        "BLOCK_M": PREFILL.pairs, "BLOCK_N": PREFILL.keys, "BLOCK": 128, "ROW_PER_HEAD": False,
        "POOL_HEADS": True, "ALIKE": False, "SOFTCAP": False, "PRECISION": "tf32",
    }  # fmt: skip
    pointers = dict.fromkeys(("table", "lens", "cu_q", "index", "counts"), "*i32")
    pointers |= dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    floats = dict.fromkeys(("scale", "cap"), "fp32") | dict.fromkeys(facts, "constexpr")
    names = kernel.arg_names
    aligned = [n for n in names if n in ("q", "k", "v", "out") or n[-3:] in STRIDES]
    source = ASTSource(
        fn=kernel,
        signature={n: (pointers | floats).get(n, "i32") for n in names},
        constexprs=facts,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    built = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": PREFILL.warps, "num_stages": PREFILL.stages},
    )
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert "cp.async.cg.shared.global" in built.asm["ptx"]
    assert built.metadata.shared + 1024 <= SHARED_BYTES
