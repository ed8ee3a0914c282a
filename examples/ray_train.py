"""Training with Ray Train over several nodes, each of which keeps a part of the data set.

    python examples/ray_train.py /mnt/nfs/train /mnt/nfs/runs 4 2

Four workers, each with two processes that load. Ray joins the workers by torch.distributed, so the
Loader finds ranks and nodes by itself. When a worker fails, all are restarted, also on other
nodes, and resume from the latest checkpoint at the exact sample. So does a run that is started
again, also with other numbers of workers and processes. All nodes see both folders, and for GPUs
``ScalingConfig`` takes ``use_gpu=True``. Needs ``pip install "ray[train]"`` (2.60).
"""

import sys

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

import stoker
from stoker.images import Train
from stoker.pytorch.integrations.ray_train import Checkpoints


def train(config):
    """Train two epochs on one worker; Ray calls it on each."""
    data = stoker.ImageFolder(config["data"], Train(32))
    model = prepare_model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 1000)))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    with stoker.Loader(data, 8, num_workers=config["processes"], cache="20%") as loader:
        checkpoints = Checkpoints(loader, model=model, optimiser=optimiser)
        for epoch in range(checkpoints.restore(), 2):
            for step, batch in enumerate(loader):  # after a checkpoint: what is left
                images, labels = (part.to(get_device()) for part in batch)
                loss = torch.nn.functional.cross_entropy(model(images / 255), labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                if step % 100 == 0:
                    checkpoints.report(epoch, loss=loss.item())
            checkpoints.report(epoch + 1, hit_ratio=loader.stats.hit_ratio)


def main(data, runs, workers, processes):
    """Return what starts the workers and waits for them."""
    scaling = ScalingConfig(num_workers=int(workers))
    run = RunConfig(name="run", storage_path=runs, failure_config=FailureConfig(max_failures=3))
    config = {"data": data, "processes": int(processes)}
    return TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run)


if __name__ == "__main__":
    print(main(*sys.argv[1:]).fit().metrics)
