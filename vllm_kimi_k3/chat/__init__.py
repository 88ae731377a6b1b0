"""The chat protocol of Kimi K3: tokenizer, renderer, history repair, effort, parser. Imports no torch."""
