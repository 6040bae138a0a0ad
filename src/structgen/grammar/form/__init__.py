"""Forms of texts, character by character, and how they become grammars of the backend."""
