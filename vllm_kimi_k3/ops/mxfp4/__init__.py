"""MXFP4: 4-bit E2M1 values in groups of 32 that share an E8M0 scale."""

from vllm_kimi_k3.ops.mxfp4.reference import GROUP, dequantise

__all__ = ["GROUP", "dequantise"]
