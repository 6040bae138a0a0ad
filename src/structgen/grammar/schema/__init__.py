"""JSON Schema: read and bounded, relaxed to what masks enforce, and checked in the end."""

from structgen.grammar.schema.relaxing import Relaxed, relaxed, source_of

__all__ = ("Relaxed", "relaxed", "source_of")
