"""Constraints made into matchers, and the automata of stop patterns."""
