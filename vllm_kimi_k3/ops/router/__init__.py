"""The router: which experts work on a token, and with what weight."""

from vllm_kimi_k3.ops.operation import Operation
from vllm_kimi_k3.ops.router.reference import router_reference

router = Operation("router", router_reference)
