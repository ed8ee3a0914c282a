"""A plain PyTorch program that reads files; it knows nothing of Stoker.

    python examples/tiering_pytorch.py /mnt/nfs/train
    stoker run --source /mnt/nfs/train --tier /nvme/stoker:100GiB -- \
        python examples/tiering_pytorch.py /mnt/nfs/train

Trains a small network to tell how bright a file is, for some epochs; prints for each the samples,
the CRC-32 of all bytes (added up, so that the order does not matter) and the seconds it took. Each
file is a sample; of a file larger than --record bytes each record is one.
"""

import argparse
import time
import zlib
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

_SEEN = 4096  # bytes of a sample that the network looks at


class Records(Dataset):
    """All records of all files below a folder."""

    def __init__(self, folder, record):
        self.record = record
        self.opened = None, None  # path and file that this worker read last
        self.places = []
        for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
            size = path.stat().st_size
            self.places += [(str(path), at) for at in range(0, size, record)]

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        path, at = self.places[index]
        if self.opened[0] != path:
            self.opened = path, open(path, "rb")  # noqa: PTH123, SIM115
        file = self.opened[1]
        file.seek(at)
        data = file.read(self.record)
        pixels = torch.frombuffer(bytearray(data[:_SEEN].ljust(_SEEN, b"\0")), dtype=torch.uint8)
        return pixels, zlib.crc32(data)


def main():
    """Train on the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--record", type=int, default=1 << 20)
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    parser.add_argument("--start-method", choices=["fork", "spawn", "forkserver"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = Records(args.folder, args.record)
    loader = DataLoader(
        data,
        batch_size=args.batch,
        shuffle=not args.in_order,
        num_workers=args.workers,
        multiprocessing_context=args.start_method,
    )
    network = torch.nn.Sequential(
        torch.nn.Linear(_SEEN, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-3)
    for epoch in range(1, args.epochs + 1):
        began, samples, total = time.perf_counter(), 0, 0
        for pixels, sums in loader:
            inputs = pixels.float() / 255
            loss = torch.nn.functional.mse_loss(network(inputs)[:, 0], inputs.mean(1))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            samples, total = samples + len(sums), total + int(sums.sum())
        seconds = time.perf_counter() - began
        print(f"epoch {epoch}: {samples} samples, sum {total}, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
