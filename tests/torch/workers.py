"""Workers of a DataLoader that call attention: `python workers.py fork` or `spawn`."""

import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset

import regard
from regard.engines.cpu.target import cache


class Attended(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> torch.Tensor:
        x = torch.arange(32.0).reshape(1, 8, 4) + n
        rule = regard.mask(lambda b, h, i, j: (i - j) % (n + 1) == 0) & regard.causal()
        q = x.clone().requires_grad_()
        out = regard.attention(q, x, x, mask=rule)
        out.sum().backward()
        return torch.stack([out.detach(), q.grad])


def main() -> None:
    how, expected, stop = sys.argv[1], [Attended()[n] for n in range(8)], threading.Event()

    def until_stopped() -> None:
        while not stop.is_set():
            cache.forget()  # to compile again, which holds a lock for most of the time
            Attended()[0]

    other = threading.Thread(target=until_stopped, daemon=True)  # which does not outlive a failure
    if how == "fork":
        other.start()
    for _ in range(3 if how == "fork" else 1):
        loader = DataLoader(Attended(), batch_size=None, num_workers=2, multiprocessing_context=how, timeout=200)
        assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))
    stop.set()
    if how == "fork":
        other.join()


if __name__ == "__main__":
    main()
