"""Trains on a folder of images as Transformers' run_image_classification.py does.

python hf_image_classification.py --train_dir /mnt/nfs/train --output_dir out
"""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import load_dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments, ViTConfig
from transformers import ViTForImageClassification as Model


@dataclass
class DataTrainingArguments:
    """Where the data is, and how large images become."""

    train_dir: str
    size: int = 32


def collate_fn(examples):
    """Return the inputs of the model."""
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def main():
    """Train."""
    data_args, training_args = HfArgumentParser(
        (DataTrainingArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    dataset = load_dataset("imagefolder", data_files={"train": f"{data_args.train_dir}/**"})

    def train_transforms(batch):
        images = [image.convert("RGB").resize((data_args.size,) * 2) for image in batch["image"]]
        pixels = (torch.from_numpy(np.array(image, np.float32)) for image in images)
        batch["pixel_values"] = [each.permute(2, 0, 1) / 255 for each in pixels]
        return batch

    dataset["train"].set_transform(train_transforms)
    model = Model(
        ViTConfig(
            num_labels=dataset["train"].features["label"].num_classes,
            image_size=data_args.size,
            patch_size=8,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        data_collator=collate_fn,
    )
    trainer.train()


if __name__ == "__main__":
    main()
