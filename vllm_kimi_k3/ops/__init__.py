"""Operations of K3, one folder each: ``reference.py`` (plain torch, any device) beside the fast kernels.

A folder's ``__init__`` exports one :class:`~vllm_kimi_k3.ops.operation.Operation`; callers call that and never a
kernel. Shapes and dtypes stand in the reference's docstring and hold for every implementation.
"""
