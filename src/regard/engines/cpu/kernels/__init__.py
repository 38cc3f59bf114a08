"""The kernels, and the parts that they share."""
