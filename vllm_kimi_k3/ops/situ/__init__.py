"""SiTU: K3's gated activation."""

from vllm_kimi_k3.ops.operation import Operation
from vllm_kimi_k3.ops.situ.reference import situ_reference

situ = Operation("situ", situ_reference)
