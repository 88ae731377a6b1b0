"""Causal attention over paged latent rows (MLA in its absorbed form)."""

from vllm_kimi_k3.ops.latent_attention.reference import latent_attention_reference
from vllm_kimi_k3.ops.operation import Operation

latent_attention = Operation("latent_attention", latent_attention_reference)
