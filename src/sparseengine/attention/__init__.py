"""Attention backends: each runs an `AttentionView` of one layer and knows no method."""

from sparseengine.registry import Registry

BACKENDS = Registry(
    "attention backend",
    {
        "cudnn": "sparseengine.attention.gathered:CudnnBackend",
        "flash": "sparseengine.attention.gathered:FlashBackend",
        "triton": "sparseengine.attention.triton:TritonBackend",
        "cpu": "sparseengine.attention.cpu:CpuBackend",
        "deterministic": "sparseengine.attention.deterministic:DeterministicBackend",
        "reference": "sparseengine.attention.reference:ReferenceBackend",
    },
)

__all__ = ["BACKENDS"]
