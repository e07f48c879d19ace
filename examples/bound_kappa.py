"""A hard bound on the condition number, without re-initialising the weight."""

import torch
from torch import nn

from kappascope import Components, corrections

torch.manual_seed(0)
layer = nn.Linear(32, 32, bias=False)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
before = float(Components(layer.weight.detach()).condition_number)
x = torch.randn(64, 32)

with corrections.SingularValueBound(20.0).attach(layer, optimizer):
    for _ in range(20):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        assert Components(layer.weight.detach()).condition_number <= 20.0
after = float(Components(layer.weight.detach()).condition_number)
print(f"kappa {before:.0f} -> {after:.1f}")
