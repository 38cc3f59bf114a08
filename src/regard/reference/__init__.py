"""The executable specification, which judges every engine.

Read `specification` first: attention, its derivatives and its statistics in O(n²), as formulas in `einsum`. `engine`
makes it the engine "spec".
"""
