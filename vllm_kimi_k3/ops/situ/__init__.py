"""SiTU: K3's gated activation."""

from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton
from vllm_kimi_k3.ops.situ.reference import situ_reference

situ = Operation("situ", situ_reference)
situ.add("triton", runs_triton, kernel("vllm_kimi_k3.ops.situ.triton", "situ"))
