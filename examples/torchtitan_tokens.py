"""A data loader for torchtitan: windows of token files, through a cache.

``TokenDataLoader.Config(dataset_path="/mnt/nfs/tokens-*.bin")`` is the ``dataloader`` of the
Trainer's configuration. torchtitan saves and loads the position with the model, which any number of
workers and any degree of data parallelism resume from. Needs ``pip install torchtitan``.
"""

import pickle
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader

import stoker
from stoker.source import NumpySource


def split(rows):
    """Return ``i64[n, seq_len]`` tokens, and those that follow them."""
    tokens = torch.stack([torch.from_numpy(row.astype("int64")) for row in rows])
    return {"input": tokens[:, :-1]}, tokens[:, 1:]


class TokenDataLoader(stoker.Loader, BaseDataLoader):
    """Epoch after epoch of windows of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What the user sets."""

        num_workers: int = 4
        cache: str = "20%"

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        source = NumpySource(config.dataset_path, dtype="uint16", shape=(seq_len + 1,))
        dataset = stoker.SampleDataset(source, decode=source.decode)
        options = {"num_workers": config.num_workers, "cache": config.cache, "collate_fn": split}
        options |= {"rank": dp_rank, "world_size": dp_world_size}
        super().__init__(dataset, local_batch_size, **options)

    def __iter__(self):
        while True:
            yield from super().__iter__()

    def state_dict(self):
        """Return one value, the same on each rank, for torch's distributed checkpoints."""
        return {"loader": pickle.dumps(super().state_dict())}

    def load_state_dict(self, state_dict):
        """Resume from what :meth:`state_dict` gave."""
        if state_dict:  # empty where there was no checkpoint
            super().load_state_dict(pickle.loads(state_dict["loader"]))
