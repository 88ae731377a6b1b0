"""The vision tower's rotary embedding."""

from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton
from vllm_kimi_k3.ops.rotary.reference import rotary_reference

rotary = Operation("rotary", rotary_reference)
rotary.add("triton", runs_triton, kernel("vllm_kimi_k3.ops.rotary.triton", "rotary"))
