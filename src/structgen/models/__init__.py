"""Architectures, checkpoints, tokenizers and chat templates."""
