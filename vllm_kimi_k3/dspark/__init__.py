"""DSpark: drafts of several tokens at once from hidden states of the target, and what becomes of them."""
