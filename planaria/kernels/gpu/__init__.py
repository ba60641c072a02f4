"""Kernels for GPUs: Triton's, and torch's own where they do. Tested in Triton's interpreter; not run on hardware."""
