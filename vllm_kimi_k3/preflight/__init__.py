"""Preflight: what will not work, and what to change, before weights are loaded."""
