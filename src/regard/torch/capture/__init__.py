"""`regard.capture` of PyTorch modules.

| Module | Contents |
|---|---|
| `recorder` | records the attention calls of a module while it runs |
| `runs` | which modules run in which thread |
| `texts` | the texts that it reads |
| `switched` | functions that are replaced meanwhile |
| `forward` | forward passes without logits and cache |
| `grids`, `tiles` | where the patches of pictures are, by configurations or the caller, and those in tiles |
| `pictured` | runs on a picture |
| `pretrained` | captures of transformers' models, for the commands |
"""
