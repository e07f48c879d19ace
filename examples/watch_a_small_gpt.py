"""Watch a small GPT learn a text: what was recorded can be read as a table and as a page."""

import torch
from torch import nn

import kappascope

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
CONTEXT, WIDTH, HEADS = 32, 32, 2

torch.manual_seed(0)
letters = sorted(set(TEXT))
tokens = torch.tensor([letters.index(letter) for letter in TEXT])


class GPT(nn.Module):
    """Two blocks of causal attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(letters), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict the next letter at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        stream = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.blocks(stream, mask, is_causal=True))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
with kappascope.Monitor("runs/gpt", every=20).attach(model, optimizer) as monitor:
    for _ in range(60):
        starts = torch.randint(len(tokens) - CONTEXT - 1, (16, 1))
        windows = tokens[starts + torch.arange(CONTEXT + 1)]
        logits = model(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        losses.append(loss.item())
monitor.report("run.html")

matrices = {row["matrix"] for row in monitor.table().to_pylist()}
assert losses[-1] < 0.7 * losses[0]
assert len(matrices) > 10 and not [one for one in monitor.alerts if one.name == "non-finite"]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {len(matrices)} matrices were watched")
print("open run.html, or type: kappascope watch runs/gpt --once")
