"""Attention residuals: mix the block snapshots and the running stream into a layer's input."""

from vllm_kimi_k3.ops.attn_res.reference import attn_res_norm_reference
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton

attn_res_norm = Operation("attn_res", attn_res_norm_reference)
attn_res_norm.add("triton", runs_triton, kernel("vllm_kimi_k3.ops.attn_res.triton", "attn_res_norm"))
