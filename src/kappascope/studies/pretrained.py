"""Pretrained checkpoints.

Are the weights that people trained as badly conditioned as the paper fears, by kind of layer and by
depth? Does the bottom of their spectra, on which kappa hangs, matter: what does a language model
lose without its smallest singular values, or without others of the same number or energy? And what
does rounding to bf16, int8 and int4 do to kappa, and to what the networks answer?

A Llama of 15 M parameters trained on children's stories (stories15M) is measured by its loss, a
sentence encoder (MiniLM) by where it puts sentences; an ALBERT and two convolutional networks lend
their spectra (in the gallery, dashed lines are those of chance). The Llama reads stories that it
tells itself, one set a seed: the loss it is then expected to lose by a change is the divergence of
its distributions from the intact ones, which is summed over all words and not sampled. It also
reads Shakespeare, who is far from what it knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from kappascope import materials
from kappascope.bookmarks import Bookmark
from kappascope.figures import sheet
from kappascope.lab import Batch, Setting, Study, grid
from kappascope.statistics import rank_correlation
from kappascope.studies import pretrained_exhibits as views
from kappascope.studies.pretrained_anatomy import anatomy, used
from kappascope.studies.pretrained_changes import EQUAL, FORMATS, NOISE, Change, Factors
from kappascope.studies.pretrained_claims import CLAIMS
from kappascope.studies.pretrained_models import (
    EMBEDDING,
    Bert,
    Llama,
    Network,
    bert,
    llama2c,
    stored,
)
from kappascope.tasks import generator
from kappascope.weights.roles import kind

STORIES, TOKENS = 2, 256  # texts of a seed, and their length: all that the Llama can see
SENTENCES = 48  # of a seed: 1,128 pairs
DECILE = 0.1
SHARES = (0.05, DECILE, 0.2, 0.4)
LAYERS = "layers"  # all matrices but the embedding
BY_KIND = ("smallest", "bulk", f"bulk {EQUAL}", NOISE)
WHOLE = (
    *(Change(what, share) for share in SHARES for what in ("smallest", "bulk")),
    Change("largest", 0.01),
    *(Change(f"{what} {EQUAL}", DECILE) for what in ("bulk", "largest", "noise")),
    *(Change(what, DECILE, scope) for scope in (LAYERS, "embedding") for what in BY_KIND),
    *map(Change, FORMATS),
)
ONE_BY_ONE = "int8 by row"


class Patient(ABC):
    """A network that is changed and changed again, always from what it was."""

    def __init__(self, network: Network, seed: int) -> None:
        self.network, self.seed = network, seed

    @cached_property
    def factors(self) -> dict[str, Factors]:
        """The matrices that may be changed. Places of tokens are left alone: few are in use."""
        names = (name for name in used(self.network.state) if "position_embeddings" not in name)
        return {name: Factors.of(name, self.network.state[name]) for name in names}

    def changes(self, part: str) -> tuple[Change, ...]:
        """What is done to all matrices, to those of each kind, or to one after the other."""
        if part == "single":
            return tuple(Change(ONE_BY_ONE, scope=name) for name in self.factors)
        if part == "whole":
            return WHOLE
        kinds = dict.fromkeys(k for name in self.factors if (k := kind(name)) != "embedding")
        return tuple(Change(what, DECILE, one) for one in kinds for what in BY_KIND)

    def rows(self, change: Change, part: str) -> Iterator[Batch]:
        """How much is changed, and what that does to the answers."""
        columns = {"change": change.what, "share": change.share, "scope": change.scope}
        names = [n for n in self.factors if change.scope in scopes(n)]
        changed = {n: change(self.factors[n], self.seed) for n in names}
        taken = sum(float(torch.dist(changed[n], self.factors[n].matrix)) ** 2 for n in names)
        whole = sum(float(self.factors[n].s.square().sum()) for n in names)
        yield {**columns, "component": "energy", "value": taken / whole}
        network = self.network.altered(changed)
        yield from ({**columns, **row} for row in self.answers(network, part))

    @abstractmethod
    def answers(self, network: Network, part: str) -> Iterator[Batch]:
        """What the changed network says, against the intact one."""


def scopes(name: str) -> tuple[str, ...]:
    """All scopes that a matrix lies in."""
    return ("all", name, kind(name), "" if kind(name) == "embedding" else LAYERS)


@final
class Reader(Patient):
    """The Llama and the texts it reads."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.llama, tokenizer = llama2c(materials.path("stories15m").read_bytes())
        super().__init__(self.llama, seed)
        random = generator("pretrained texts", seed)
        own = self.llama.sampled(STORIES, tokens, random)
        text = materials.text(materials.SHAKESPEARE)
        starts = torch.randint(len(text) - 8 * tokens, (STORIES,), generator=random).tolist()
        # from the next line on; no token has more than 8 letters on average
        parts = [text[text.index("\n", start) :][: 8 * tokens] for start in starts]
        theirs = [[1, *tokenizer.encode(part.strip())][:tokens] for part in parts]
        self.texts = {"own": own, materials.SHAKESPEARE: torch.tensor(theirs)}

    @cached_property
    def intact(self) -> dict[str, Tensor]:
        """Its log probabilities before any change."""
        return {name: self.llama(text).log_softmax(-1) for name, text in self.texts.items()}

    def answers(self, network: Network, part: str) -> Iterator[Batch]:  # noqa: D102 - as in Patient
        for name, text in self.texts.items():
            if part != "whole" and name != "own":
                continue
            before, after = self.intact[name], network(text).log_softmax(-1)
            divergence = float((before.exp() * (before - after)).sum(-1).mean())
            was, now = (_loss(words, text) for words in (before, after))
            rise = (divergence if name == "own" else now - was) / was
            yield {"text": name, "component": "loss", "value": now, "target": was}
            yield {"text": name, "component": "divergence", "value": divergence}
            yield {"text": name, "component": "rise", "value": rise}
        before, after = (n.state[EMBEDDING][self.texts["own"]] for n in (self.network, network))
        taken = float((after - before).square().sum() / before.square().sum())
        yield {"text": "own", "component": "energy_spoken", "value": taken}


def _loss(words: Tensor, text: Tensor) -> float:
    return float(nll_loss(words[:, :-1].flatten(0, 1), text[:, 1:].flatten()))


@final
class Encoder(Patient):
    """The sentence encoder and lines of Shakespeare, no line in two seeds."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.bert: Bert = bert(materials.path("minilm"))
        super().__init__(self.bert, seed)
        lines = materials.text(materials.SHAKESPEARE).splitlines()
        long = [line for line in lines if len(line) > 30]  # shorter ones are names and cries
        order = torch.randperm(len(long), generator=generator("pretrained sentences")).tolist()
        chosen = order[SENTENCES * seed : SENTENCES * (seed + 1)]
        self.sentences = [self.bert.encode(long[place])[:tokens] for place in chosen]

    @cached_property
    def intact(self) -> Tensor:
        """Where the sentences were before any change."""
        return self.bert(self.sentences)

    def answers(self, network: Network, part: str) -> Iterator[Batch]:  # noqa: D102 - as in Patient
        before, after = self.intact, network(self.sentences)
        above = torch.ones(len(before), len(before)).triu(1).bool()
        was, now = ((x @ x.T)[above].numpy() for x in (before, after))
        about = {"text": materials.SHAKESPEARE}
        distance = float(1 - (before * after).sum(-1).mean())
        yield {**about, "component": "distance", "value": distance}
        yield {**about, "component": "order", "value": rank_correlation(was, now).value}


PATIENTS: dict[str, Callable[[int, int], Patient]] = {"stories15m": Reader, "minilm": Encoder}


def spectra(model: str) -> Iterator[Batch]:
    """The anatomy of one checkpoint."""
    if model == "stories15m":
        llama: Llama = llama2c(materials.path(model).read_bytes())[0]
        return anatomy(llama.state, llama.config)
    name, _, size = model.partition(" ")
    return anatomy(*stored(materials.path(name) / f"{size}.pth" if size else materials.path(name)))


def trials(
    seed: int, bookmark: Bookmark, model: str, part: str, tokens: int = TOKENS
) -> Iterator[Batch]:
    """Look at one checkpoint, or change it in many ways and see what it answers."""
    if part == "spectra":
        yield from spectra(model)
        return
    patient = PATIENTS[model](seed, tokens)
    changes, log = patient.changes(part), list[Batch]()
    with torch.no_grad():
        for step in bookmark.steps(len(changes), log):
            log += patient.rows(changes[step], part)
    yield from log


COSTS = {"spectra": (5.0, 8.0), "whole": (28.0, 12.0), "kinds": (18.0, 8.0), "single": (23.0, 10.0)}


def seconds(setting: Setting) -> float:
    """Measured on one core: of the Llama, of others."""
    cost = COSTS[str(setting["part"])][setting["model"] != "stories15m"]
    return cost / 3 if setting.get("tokens", TOKENS) != TOKENS else cost


MODELS = ("stories15m", "minilm", "albert", "crepe tiny", "crepe full")
SEEDS = {"spectra": 1, "whole": 12, "kinds": 12, "single": 6}  # a spectrum is what it is
STUDY = Study(
    number=23,
    name="pretrained",
    title="Pretrained checkpoints",
    section="review W1(c), Q7",
    question=__doc__,
    grid=(
        *grid(model=MODELS, part=("spectra",)),
        *grid(model=tuple(PATIENTS), part=("whole", "kinds", "single")),
    ),
    trials=trials,
    own=lambda setting: SEEDS[str(setting["part"])],
    seconds=seconds,
    materials=("stories15m", "tiny-shakespeare", "minilm", "albert", "crepe"),
    claims=CLAIMS,
    exhibits=views.exhibits,
    plot=sheet(*views.PANELS, marks=views.MARKS),
    quick={
        "grid": (
            *grid(model=("stories15m", "albert"), part=("spectra",)),
            *grid(model=("stories15m",), part=("whole",), tokens=(64,)),
        ),
        "own": lambda setting: 1 if setting["part"] == "spectra" else 6,
        "materials": ("stories15m", "tiny-shakespeare", "albert"),
    },
)
