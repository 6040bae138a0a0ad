"""Tensors in, tensors out: attention over a pool of token slots, and the noise of sampling.

Imports torch, triton and numpy only; knows no model, no request and no scheduler.
"""
