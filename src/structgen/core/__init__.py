"""The engine's core: requests, slots and prefixes as a state machine without clock or thread."""
