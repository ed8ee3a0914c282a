"""Trains a small GPT on a file of tokens as nanoGPT's train.py does, by random windows of a memmap.

python nanogpt.py /mnt/nfs/train.bin --max_iters 1000
"""

import argparse

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("path")
parser.add_argument("--max_iters", type=int, default=600)
parser.add_argument("--batch_size", type=int, default=12)
parser.add_argument("--block_size", type=int, default=64)
parser.add_argument("--n_embd", type=int, default=128)
parser.add_argument("--vocab_size", type=int, default=50304)
args = parser.parse_args()
torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = np.memmap(args.path, dtype=np.uint16, mode="r")


def get_batch():
    """Return tokens ``i64[batch, block]``, and those that follow them."""
    ix = torch.randint(len(data) - args.block_size, (args.batch_size,))
    tokens = torch.stack([torch.from_numpy(data[i : i + args.block_size + 1]) for i in ix])
    tokens = tokens.long()
    return tokens[:, :-1].to(device), tokens[:, 1:].contiguous().to(device)


class GPT(nn.Module):
    """One block of a transformer that sees what came before."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.n_embd)
        self.places = nn.Embedding(args.block_size, args.n_embd)
        self.block = nn.TransformerEncoderLayer(args.n_embd, 4, 4 * args.n_embd, 0.0, "gelu")
        self.head = nn.Linear(args.n_embd, args.vocab_size, bias=False)

    def forward(self, x, y):
        """Return the loss of predicting ``y`` from ``x``."""
        hidden = self.tokens(x) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(args.block_size, device)
        hidden = self.block(hidden.transpose(0, 1), mask, is_causal=True).transpose(0, 1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.view(-1))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(args.max_iters):
    x, y = get_batch()
    loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"iter {step}: loss {loss.item():.4f}")
