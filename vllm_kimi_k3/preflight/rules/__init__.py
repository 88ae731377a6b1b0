"""The rules: one module a subject, each with a ``check`` that yields findings."""
