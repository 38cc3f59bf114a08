"""Attention as WebAssembly, for web pages.

| Module | Contents |
|---|---|
| `module` | kernels of some rules as one module, with a description that the loader reads |
| `linking` | a linker from LLVM's object to that module |
| `loader.js`, `loader.d.ts` | what a page imports: it checks a call, lists its tiles, and runs the kernels |
"""
