"""A miniature Kimi K3: its shape, data, training, draft and score card."""
