"""GGUF files: header, block formats, configuration and vocabulary, read without `gguf`'s reader.

Format of Gerganov and contributors (the ggml project, `docs/gguf.md`).
"""
