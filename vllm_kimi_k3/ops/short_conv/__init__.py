"""The short causal convolution before KDA."""

from vllm_kimi_k3.ops.operation import Operation
from vllm_kimi_k3.ops.short_conv.reference import short_conv_decode_reference, short_conv_prefill_reference

short_conv_prefill = Operation("short_conv_prefill", short_conv_prefill_reference)
short_conv_decode = Operation("short_conv_decode", short_conv_decode_reference)
