"""Attention residuals: mix the block snapshots and the running stream into a layer's input."""

from vllm_kimi_k3.ops.attn_res.reference import attn_res_norm_reference, attn_res_reference
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton

_TRITON = "vllm_kimi_k3.ops.attn_res.triton"

attn_res = Operation("attn_res", attn_res_reference)
attn_res.add("triton", runs_triton, kernel(_TRITON, "attn_res"))

attn_res_norm = Operation("attn_res_norm", attn_res_norm_reference)
attn_res_norm.add("triton", runs_triton, kernel(_TRITON, "attn_res_norm"))
