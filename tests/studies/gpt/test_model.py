"""The character GPT, its text and its optimizers."""

import math

import pytest
import torch

from kappascope.lab.optimizers import Muon
from kappascope.lab.tasks import generator
from kappascope.refusal import Refusal
from kappascope.studies.gpt import model as gpt_model
from kappascope.studies.gpt import study as gpt
from kappascope.studies.gpt.model import CONTEXT, GPT, Corpus, optimizers
from odd_text import TEXT


def model(vocabulary: int = 67, width: int = 64) -> GPT:
    return GPT(vocabulary, 2, width, generator("test", 0))


def test_the_future_does_not_change_the_past() -> None:
    net, text = model(), torch.randint(67, (2, CONTEXT), generator=generator("text"))
    changed = text.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 67
    with torch.no_grad():
        before, after = net(text), net(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_the_first_loss_is_that_of_guessing() -> None:
    corpus = Corpus.of(TEXT)
    loss = gpt_model.validation(model(corpus.vocabulary), corpus.held_out())
    assert loss == pytest.approx(math.log(corpus.vocabulary), abs=0.35)


def test_every_matrix_in_the_blocks_but_the_keys_may_have_multipliers() -> None:
    net = model()
    handle = gpt.CORRECTIONS["multipliers"].attach(net, list(optimizers(net, "AdamW").values()))  # type: ignore[union-attr]
    kinds = {name.split(".")[-2] for name in handle.left_out}
    assert kinds == {"token_embedding", "position_embedding", "key", "head"}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # said when flags are set
def test_muon_is_torch_s_but_for_rounding() -> None:
    shapes = [(24, 24), (24, 96), (96, 24), (24, 24)]
    starts = [torch.randn(*shape, generator=generator("muon", *shape)) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    makers = [
        maker(those, lr=0.02, adjust_lr_fn="match_rms_adamw")
        for maker, those in ((Muon, ours), (torch.optim.Muon, theirs))
    ]
    for step in range(3):
        for mine, torchs in zip(ours, theirs, strict=True):
            gradient = torch.randn(mine.shape, generator=generator("gradient", step, *mine.shape))
            mine.grad, torchs.grad = gradient, gradient.clone()
        makers[0].step()
        # torch multiplies in bfloat16, with instructions that some machines only announce
        with torch.backends.mkldnn.flags(enabled=False):
            makers[1].step()
    for mine, torchs, start in zip(ours, theirs, starts, strict=True):
        moved = (torchs - start).norm()
        assert (mine - torchs).norm() < 0.03 * moved  # bfloat16 has 8 bits


def test_a_short_text_is_refused_in_one_line() -> None:
    with pytest.raises(Refusal, match=r"the text: has 19,999 characters \(give one of 20,000"):
        Corpus.of("a" * 19_999)


def test_windows_fit_the_shortest_text_and_know_its_end() -> None:
    corpus = Corpus.of("ab" * 10_000)
    assert corpus.held_out().shape == (512, CONTEXT + 1)
    assert corpus.batch(5, generator("x")).shape == (5, CONTEXT + 1)
    assert torch.equal(corpus.held_out()[-1], corpus.validation[-CONTEXT - 1 :])
    assert corpus.frequency_loss == pytest.approx(math.log(2))
