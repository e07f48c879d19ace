"""Compare a fine-tuned model with its base: only the layer that was tuned has moved."""

import torch
from torch import nn

import kappascope

torch.manual_seed(0)
base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
torch.save(base.state_dict(), "base.pt")
with torch.no_grad():
    base[2].weight += 0.01 * torch.randn(8, 64)
torch.save(base.state_dict(), "tuned.pt")

found = kappascope.diagnose("tuned.pt", reference="base.pt")
moved = {row.name: row.errors["overall_matrix"] for row in found.matrices}

assert moved["0.weight"] == 0.0 < moved["2.weight"]
print("relative change of each matrix:", moved)
