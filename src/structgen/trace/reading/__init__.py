"""From the source of a program to the steps of its plan; `plan` is the way in."""
