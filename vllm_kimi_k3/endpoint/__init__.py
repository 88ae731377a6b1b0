"""A running endpoint, looked at as a client does: any OpenAI-compatible server of K3."""
