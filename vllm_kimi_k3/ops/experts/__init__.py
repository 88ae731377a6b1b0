"""The routed experts, from their MXFP4 bytes."""

from vllm_kimi_k3.ops.experts.reference import experts_reference
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton

experts = Operation("experts", experts_reference)
experts.add("triton", runs_triton, kernel("vllm_kimi_k3.ops.experts.triton", "experts"))
