"""What is to be served, as the rules want to know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Serving:
    """A view of the options of ``vllm serve``; an option that was not given is None or its default.

    Attributes:
        options: by name with underscores; the model under "model".
        environ: environment variables.
        unknown: names that no supported vLLM knows.
        frontend: whether the options of the API server are among them; the engine's config has none of those.
    """

    options: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    frontend: bool = True

    def get(self, name: str, default: Any = None) -> Any:
        """An option's value, or ``default`` where it is absent or None."""
        value = self.options.get(name)
        return default if value is None else value

    def size(self, name: str) -> int:
        """An option that counts something; 1 where it is absent."""
        return int(self.get(name, 1))

    @property
    def tp(self) -> int:
        return self.size("tensor_parallel_size")

    @property
    def pp(self) -> int:
        return self.size("pipeline_parallel_size")

    @property
    def dp(self) -> int:
        return self.size("data_parallel_size")

    @property
    def nodes(self) -> int:
        return self.size("nnodes")

    @property
    def world(self) -> int:
        """GPUs that it takes, on all nodes together."""
        return self.tp * self.pp * self.dp

    @property
    def kv_dtype(self) -> str:
        return str(self.get("kv_cache_dtype", "auto"))

    @property
    def fp8(self) -> bool:
        """Whether MLA rows are fp8."""
        return self.kv_dtype.startswith("fp8")

    @property
    def attention(self) -> Mapping[str, Any]:
        """``--attention-config``."""
        return _mapping(self.get("attention_config"))

    @property
    def attention_backend(self) -> str | None:
        """Of the target, upper case."""
        name = self.get("attention_backend") or self.attention.get("backend")
        return str(name).upper() if name else None

    @property
    def speculative(self) -> Mapping[str, Any]:
        """``--speculative-config``, the flat forms included; empty without speculation."""
        config = dict(_mapping(self.get("speculative_config")))
        for option, name in (
            ("spec_method", "method"),
            ("spec_model", "model"),
            ("spec_tokens", "num_speculative_tokens"),
        ):
            if self.get(option) is not None:
                config.setdefault(name, self.get(option))
        return config

    @property
    def connector(self) -> Mapping[str, Any]:
        """``--kv-transfer-config``; empty without a connector."""
        return _mapping(self.get("kv_transfer_config"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
