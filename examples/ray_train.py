"""Training with Ray Train over several nodes, each of which keeps a part of the data set.

    python examples/ray_train.py /mnt/nfs/train --workers 4 --storage /mnt/nfs/runs

Ray starts one process per worker and joins them by torch.distributed, so the Loader finds ranks
and nodes by itself. When a worker fails, all are restarted, also on other nodes, and resume
from the latest checkpoint at the exact sample. So does a run that is started again with the
``--name`` that it had, also with other numbers of workers. Needs ``pip install "ray[train]"``
(2.60).
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device, prepare_model

import stoker


def to_tensor(image):
    """Return the pixels of an image, 32 x 32, from 0 to 1."""
    return torch.from_numpy(np.array(image.resize((32, 32)))).permute(2, 0, 1).float() / 255


def count_classes(data):
    """Return the number of classes.

    Not in train(): what pickles it for Ray would take ``.classes`` for the module torch.classes.
    """
    return len(data.classes)


def train(config):
    """Train on one worker; Ray calls it on each."""
    data = stoker.ImageFolder(config["data"], to_tensor)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(count_classes(data)))
    network(torch.zeros(1, 3, 32, 32))
    model = prepare_model(network)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    epochs, workers = config["epochs"], config["loader_workers"]
    with stoker.Loader(
        data, config["batch"], num_workers=workers, cache="20%", epochs=epochs
    ) as loader:
        first = 0
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                state = torch.load(Path(folder) / "state.pt")
            network.load_state_dict(state["model"])
            loader.load_state_dict(state["loader"])
            first = state["epoch"]
        loss = torch.tensor(float("nan"))
        for epoch in range(first, epochs):
            loader.set_epoch(epoch)
            for step, (images, labels) in enumerate(loader):  # after a checkpoint: what is left
                output = model(images.to(get_device()))
                loss = torch.nn.functional.cross_entropy(output, labels.to(get_device()))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                if step % 100 == 0:
                    report(loss.item(), epoch, network, loader)
            report(loss.item(), epoch + 1, network, loader)


def report(loss, epoch, network, loader):
    """Tell Ray how it goes, with a checkpoint of rank 0; all ranks call it at the same step.

    ``epoch`` is the one to resume with.
    """
    metrics = {"loss": loss, "epoch": epoch, "hit_ratio": loader.stats.hit_ratio}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"epoch": epoch, "model": network.state_dict(), "loader": loader.state_dict()}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main():
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="folder of class folders that all nodes see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loader-workers", type=int, default=2, help="of each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="samples a step, of each worker")
    parser.add_argument("--storage", help="folder for checkpoints; with several nodes all see it")
    parser.add_argument("--name", help="of the run; with that of an earlier one it resumes it")
    args = parser.parse_args()
    storage = args.storage and str(Path(args.storage).resolve())
    config = {**vars(args), "data": str(Path(args.data).resolve())}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
