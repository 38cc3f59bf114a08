"""Attention as WebAssembly for web pages, without derivatives.

| Module | Contents |
|---|---|
| `module` | kernels of some rules as one module, with a description that the loader reads |
| `scores` | a kernel for the scores of single pairs, before and after the mask |
| `linking` | a linker from LLVM's object to that module |
| `product` | a product of matrices, for pages that run a model |
| `loader.js`, `loader.d.ts` | what a page imports: it checks a call, lists its tiles, and runs the kernels |
"""
