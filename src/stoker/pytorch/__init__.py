"""The PyTorch face: data sets, the Loader and what goes with them.

The only part of Stoker that is written for torch. The arrow of one batch::

    Loader -> TorchSession -> RequestSampler -> [worker: BatchServer -> CachedSamples -> Store]
                 |                                      |
             Controller <------- Envelope <-------------'
                 |  '-> LoaderIterator -> training loop -> observe -> TensorObserver
             Observer -> Scores <--------------------------------------------'
"""

from stoker.epoch.batch import Failure
from stoker.epoch.stats import Stats
from stoker.pytorch.dataset import (
    CachedDataset,
    ImageFolder,
    MixedDataset,
    SampleDataset,
    SourceDataset,
    with_cache,
)
from stoker.pytorch.device import Normalize
from stoker.pytorch.distributed_sampler import DistributedImportanceSampler, WithIds
from stoker.pytorch.hand_over import Meta
from stoker.pytorch.loader import Loader
from stoker.pytorch.observe import per_sample_loss
from stoker.pytorch.wrapped import WrappedDataset, wrap

__all__ = [
    "CachedDataset",
    "DistributedImportanceSampler",
    "Failure",
    "ImageFolder",
    "Loader",
    "Meta",
    "MixedDataset",
    "Normalize",
    "SampleDataset",
    "SourceDataset",
    "Stats",
    "WithIds",
    "WrappedDataset",
    "per_sample_loss",
    "with_cache",
    "wrap",
]
