"""`regard.capture` of PyTorch modules.

| Module | Contents |
|---|---|
| `recorder` | records the attention calls of a module while it runs |
| `pretrained` | captures of transformers' models, for the commands |
"""
