"""The kernel language: Python that runs once and leaves LLVM IR behind."""
