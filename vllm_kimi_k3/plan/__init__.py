"""Sizing: where every byte of a deployment goes, and how much context and how many requests are left room for."""
