"""The command ``vllm-kimi-k3``."""
