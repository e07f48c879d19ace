"""Attach a correction, train as before, let it go: plain weights, the same function."""

import torch
from torch import nn

from kappascope import corrections

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
names = list(model.state_dict())
x, y = torch.randn(64, 16), torch.randn(64, 4)

handle = corrections.Hybrid().attach(model, optimizer)
for _ in range(50):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    with handle.unclipped():  # the multipliers have no part in the clip
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
trained = model(x)
handle.close()

assert torch.equal(model(x), trained)
assert list(model.state_dict()) == names
print(f"corrected {', '.join(handle.weights)}; merging changed them by {handle.difference}")
