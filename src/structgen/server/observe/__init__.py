"""What others see of a server: its health, its figures, its log, its traces."""
