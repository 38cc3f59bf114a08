"""The contents of views, as data.

| Module | Contents |
|---|---|
| `questions` | a request of the page: scene, head, queries, keys |
| `pyramid` | a head's weights as a map that zooms |
| `profiles` | weight by distance, entropy and attention received along a sequence |
| `ablation` | the example model without one head: loss and next-token odds; norms of values |
| `paths` | earlier heads that wrote what a head reads at a key |
| `matrices` | every matrix of a small head; the scores of one query before and after the mask |
| `stages` | one query and one key, step by step |
| `scores` | scores of heads as a table |
| `outlines` | the columns, diagonals and stripes of a head's map, and its heaviest weights |
| `finding` | the head and the query to show first; the key that a query looks at most |
| `tour` | the steps of the guided tour |
| `sentences` | texts of the page, terminal and pictures: lines above views, a glossary, patterns |
| `numbers` | numbers as JSON has them |
| `dots` | q · k before scale and softmax, and how its variance grows with d |
| `summary` | a model and a text, as the terminal, page and picture draw them |
"""
