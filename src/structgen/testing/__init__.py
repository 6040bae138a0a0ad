"""A backend without a model, for tests of programs and of whatever uses a backend.

Owns   a script of replies, and counts of what was asked. It keeps the contract of `Backend`,
       held to it by the conformance suite that the engine passes too.

    backend = ScriptedBackend({"score": "7"})
    result = await judge.run(backend, "An essay.")
    assert result["score"] == "7"
"""

from structgen.testing.backend import Script, ScriptedBackend
from structgen.testing.tokenizer import END_ID, FINGERPRINT, ScriptedTokenizer

__all__ = ("END_ID", "FINGERPRINT", "Script", "ScriptedBackend", "ScriptedTokenizer")
