"""The contents of views, as data.

| Module | Contents |
|---|---|
| `questions` | a question of the page: scene, head, queries, keys |
| `pyramid` | a head's weights as a map that zooms |
| `profiles` | weight by distance, entropy and attention received along a sequence |
| `ablation` | the example model without one head: loss and odds; the length of values |
| `matrices` | every matrix of a small head; the scores of one query before and after the mask |
| `stages` | one query and one key, step by step |
| `scores` | scores of heads as a table |
| `finding` | the head that is shown first, why, and where a row looks most |
| `tour` | the steps of the guided tour |
| `sentences` | all that page, terminal and pictures say: lines above views, a glossary, patterns |
| `dots` | q · k before scale and softmax, and how its variance grows with d |
| `summary` | a model and a text: what terminal, page and picture draw |
"""
