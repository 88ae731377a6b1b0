"""Attention residuals: mix the block snapshots and the running stream into a layer's input."""

from vllm_kimi_k3.ops.attn_res.reference import attn_res_reference
from vllm_kimi_k3.ops.operation import Operation

attn_res = Operation("attn_res", attn_res_reference)
