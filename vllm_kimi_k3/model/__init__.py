"""The vLLM model of Kimi K3, from vLLM's parallel layers and this package's operations."""
