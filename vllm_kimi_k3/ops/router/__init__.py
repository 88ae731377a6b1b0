"""The router: which experts work on a token, and with what weight."""

from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton
from vllm_kimi_k3.ops.router.reference import router_reference, select_reference

_TRITON = "vllm_kimi_k3.ops.router.triton"

router = Operation("router", router_reference)
router.add("triton", runs_triton, kernel(_TRITON, "router"))

#: For a caller whose router logits come out of a larger product.
select = Operation("select", select_reference)
select.add("triton", runs_triton, kernel(_TRITON, "select"))
