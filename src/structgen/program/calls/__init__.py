"""The calls that need a model, each as the work of one operation: see `program.operations`."""
