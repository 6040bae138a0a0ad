"""What output means: types to ask for, choices to weigh, reasoning to set apart from the answer.

Pure functions and small pure classes; knows no backend, no program and no tokenizer.
"""
