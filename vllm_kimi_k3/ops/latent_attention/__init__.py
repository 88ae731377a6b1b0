"""Causal attention over paged latent rows (MLA in its absorbed form)."""

from typing import Any

import torch

from vllm_kimi_k3.ops.latent_attention.reference import latent_attention_reference, store_rows_reference
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton

_TRITON = "vllm_kimi_k3.ops.latent_attention.triton"


def _accepts(query: torch.Tensor, cache: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """The matrix units want one type on both sides."""
    return query.dtype == cache.dtype


latent_attention = Operation("latent_attention", latent_attention_reference)
latent_attention.add("triton", runs_triton, kernel(_TRITON, "latent_attention"), _accepts)

store_rows = Operation("store_rows", store_rows_reference)
store_rows.add("triton", runs_triton, kernel(_TRITON, "store_rows"))
