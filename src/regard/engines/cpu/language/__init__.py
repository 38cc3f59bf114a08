"""The language that kernels are written in: Python that runs once and leaves LLVM IR behind."""
