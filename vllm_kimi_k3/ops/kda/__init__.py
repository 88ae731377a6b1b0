"""Kimi Delta Attention: the gated delta rule with a decay a channel."""

from vllm_kimi_k3.ops.kda.chunk import kda_prefill_chunked
from vllm_kimi_k3.ops.kda.reference import kda_decode_reference
from vllm_kimi_k3.ops.operation import Operation

kda_prefill = Operation("kda_prefill", kda_prefill_chunked)
kda_decode = Operation("kda_decode", kda_decode_reference)
