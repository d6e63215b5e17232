"""A GPU that computes nothing (`driver.cpp`), for the way to the first run on one that does.

`python -m tests.gpu.hollow COMMAND …` runs a command on it, in an environment whose torch is built for CUDA. All but
the values is as on a GPU: what torch and Triton compile, allocate, launch, capture and replay, and what CUDA refuses
meanwhile. What is measured is the host's part. `make hollow-gpu` makes such an environment, as that of the first GPU
will be, and runs the GPU's tests and a server in it.
"""
