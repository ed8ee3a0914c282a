"""A data loader for torchtitan: windows of token files, through a cache, at the exact position.

``build_dataloader`` goes into the TrainSpec. torchtitan saves the loader's state with the model's
and loads it again, also with another degree of data parallelism. Needs ``pip install torchtitan``.
"""

import torch
from torchtitan.components.dataloader import BaseDataLoader

import stoker
from stoker.source import NumpySource


def split(rows):
    """Return ``i64[n, length]`` tokens, and those that follow them."""
    tokens = torch.stack([torch.as_tensor(row.astype("int64")) for row in rows])
    return {"input": tokens[:, :-1]}, tokens[:, 1:]


class TokenLoader(stoker.Loader, BaseDataLoader):
    """Epoch after epoch of windows of ``length`` tokens and one more."""

    def __init__(self, files, length, batch_size, dp_rank, dp_world_size, **options):
        source = NumpySource(files, dtype="uint16", shape=(length + 1,))
        dataset = stoker.SampleDataset(source, decode=source.decode)
        ranks = {"rank": dp_rank, "world_size": dp_world_size}
        super().__init__(dataset, batch_size, collate_fn=split, **ranks, **options)

    def __iter__(self):
        while True:
            yield from super().__iter__()


def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
    """Return what torchtitan trains on."""
    training = job_config.training
    sizes = training.seq_len, training.local_batch_size
    return TokenLoader(training.dataset_path, *sizes, dp_rank, dp_world_size, num_workers=4)
