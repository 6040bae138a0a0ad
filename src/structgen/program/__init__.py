"""The language: programs are coroutines that move a State."""
