"""Analysis of attention heads: statistics, captures of models, an example model.

| Module | Contents |
|---|---|
| `heads` | statistics of a head from its weights; its kind |
| `streamed` | the same from queries and keys, at any length |
| `maps` | heads compared by their maps |
| `paths` | earlier heads that wrote where a head reads |
| `table` | tables of heads for the terminal, JSON and CSV |
| `formats` | numbers as text, as the page has them |
| `inputs` | arguments of commands: texts, captures and arrays |
| `capture/` | the queries, keys and lse of a model's layers |
| `examplemodel/` | a small trained decoder |
"""
