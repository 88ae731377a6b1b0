"""Causal attention over paged keys and values from a row on (grouped queries)."""

from vllm_kimi_k3.ops.operation import Operation
from vllm_kimi_k3.ops.window_attention.reference import window_attention_reference

window_attention = Operation("window_attention", window_attention_reference)
