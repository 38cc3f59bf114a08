"""Masks of `linear_attention`, for the tests of all frameworks: shapes are (2, 4, 11, ...) over (2, 2, 19, ...)."""

import numpy as np

import regard

B, H, N_Q, N_K = 2, 4, 11, 19
RANDOM = np.random.default_rng(5)
KEYS = RANDOM.random((B, 1, 1, N_K)) < 0.6
BY_HEAD = RANDOM.random((B, H, 1, N_K)) < 0.6
NONE = KEYS & (np.arange(B)[:, None, None, None] == 1)
IDS = np.repeat([7, -1, 3, 2], [3, 9, 1, 6])
OF_EACH = np.stack([IDS, np.repeat([1, 2, 9], [10, 5, 4])])
LATER = np.repeat([3, 7, 5], [4, 8, 7])

MASKS = {
    "keys": KEYS,
    "keys of all": KEYS[0, 0],
    "keys of each head": BY_HEAD.astype(np.int64),
    "nothing": NONE,
    "padding": regard.padding(np.array([N_K, 12])),
    "padding on the left": regard.padding(np.array([4, 12]), side="left"),
    "function of keys": lambda b, h, i, j: j % 3 != h % 3,
    "documents": regard.documents(IDS),
    "documents of each": regard.documents(OF_EACH),
    "documents of other keys": regard.documents(IDS, LATER),
    "documents by position": lambda b, h, i, j: i // 5 == j // 5,
    "two kinds of documents": regard.documents(IDS) & (lambda b, h, i, j: i // 4 == j // 4),
    "padding and documents": regard.padding(np.array([N_K, 12])) & regard.documents(OF_EACH),
    "all of them": regard.padding(np.array([17, 12]), side="left") & BY_HEAD & regard.documents(IDS),
}
