"""RMS norm over a head, then its sigmoid output gate."""

from vllm_kimi_k3.ops.gated_norm.reference import gated_norm_reference
from vllm_kimi_k3.ops.operation import Operation

gated_norm = Operation("gated_norm", gated_norm_reference)
