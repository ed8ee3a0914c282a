"""Trains as timm's train.py does: create_dataset, create_loader with its prefetcher, create_model.

python timm_train.py --data-dir /mnt/nfs/imagenet --workers 8
"""

import argparse

import torch
from timm import create_model
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--model", default="resnet18")
parser.add_argument("--img-size", type=int, default=224)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=300)
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--num-classes", type=int, default=1000)
args = parser.parse_args()


def main():
    """Train."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = create_model(args.model, num_classes=args.num_classes).to(device)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05)
    dataset_train = create_dataset("", root=args.data_dir, split="train", is_training=True)
    loader_train = create_loader(
        dataset_train,
        input_size=(3, args.img_size, args.img_size),
        batch_size=args.batch_size,
        is_training=True,
        hflip=0.5,
        color_jitter=0.4,
        num_workers=args.workers,
        device=device,
    )
    loss_fn = torch.nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        for batch_idx, (images, targets) in enumerate(loader_train):
            loss = loss_fn(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"Train: {epoch} [{batch_idx:>4d}/{len(loader_train)}]  Loss: {loss.item():#.4g}")


if __name__ == "__main__":
    main()
