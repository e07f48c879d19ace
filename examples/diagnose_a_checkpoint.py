"""Diagnose a file: a layer that lost a row is found, and the page is written."""

from pathlib import Path

import torch
from torch import nn

import kappascope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
with torch.no_grad():
    model[0].weight[3] = 0  # a unit that can never answer
torch.save(model.state_dict(), "model.pt")

found = kappascope.diagnose("model.pt")
Path("report.html").write_text(found.html(), encoding="utf-8")

assert [one.subject for one in found.findings if one.rule == "dead-rows"] == ["0.weight"]
print(found)
print("open report.html")
