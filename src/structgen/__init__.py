"""Structured language-model programs as asyncio coroutines, with the engine in the same process."""
