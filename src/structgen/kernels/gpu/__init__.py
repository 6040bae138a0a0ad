"""The kernels of GPUs, in Triton: attention, rotation, norms, activations and sampling.

A file holds a kernel, the function that launches it, and the name of the obvious version that it
is tested against: in Triton's interpreter, which needs no GPU, by `tests/kernels/interp`.
"""
