"""What was said: an immutable chain of segments, and its layout as a prompt."""
