"""Study of pretrained checkpoints.

Are the weights that people trained as badly conditioned as the paper fears, by kind of layer and by
depth? Kappa depends on the bottom of the spectrum. Does the bottom matter: what does a language
model lose without its smallest singular values, or without others of the same number or energy? And
what does rounding to bf16, int8 and int4 do to kappa, and to what the networks answer?

There are five networks. A Llama of 15 M parameters that was trained on children's stories
(stories15M) is measured by its loss. A sentence encoder (MiniLM) is measured by where it puts
sentences. An ALBERT and two convolutional networks lend their spectra. (In the gallery, dashed
lines are those of chance.) The Llama reads stories that it tells itself, one set for each seed. By
how much a change then raises its expected loss is the divergence of its distributions from the
intact ones, which is summed over all words and not sampled. The Llama also reads Shakespeare, who
is far from its training texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from kappascope.lab import downloads
from kappascope.lab.experiment import Rows, Setting, Study, grid
from kappascope.lab.resume import ResumePoint
from kappascope.lab.statistics import rank_correlation
from kappascope.lab.tasks import generator
from kappascope.model.names import kind
from kappascope.studies.pretrained.changes import (
    DECILE,
    EQUAL,
    FORMATS,
    NOISE,
    SINGLE,
    Change,
    Factors,
)
from kappascope.studies.pretrained.claims import CLAIMS
from kappascope.studies.pretrained.exhibits import exhibits, plot
from kappascope.studies.pretrained.model import (
    EMBEDDING,
    Bert,
    Llama,
    Network,
    bert,
    llama2c,
    stored,
)
from kappascope.studies.pretrained.spectra import spectrum_rows, used

STORIES, TOKENS = 2, 256  # texts of a seed, and their length: all that the Llama can see
SENTENCES = 48  # of a seed: 1,128 pairs
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


class Evaluation(ABC):
    """A network with texts to judge it by, which is changed in many ways, each time anew."""

    def __init__(self, network: Network, seed: int) -> None:
        self.network, self.seed = network, seed

    @cached_property
    def factors(self) -> dict[str, Factors]:
        """The matrices that may be changed; position embeddings are not, for few are in use."""
        names = (name for name in used(self.network.state) if "position_embeddings" not in name)
        return {name: Factors.of(name, self.network.state[name]) for name in names}

    def changes(self, part: str) -> tuple[Change, ...]:
        """List the changes of all matrices, of those of each kind, or of one after the other."""
        if part == "single":
            return tuple(Change(SINGLE, scope=name) for name in self.factors)
        if part == "whole":
            return WHOLE
        kinds = dict.fromkeys(k for name in self.factors if (k := kind(name)) != "embedding")
        return tuple(Change(what, DECILE, each) for each in kinds for what in BY_KIND)

    def rows(self, change: Change, part: str) -> Iterator[Rows]:
        """Yield how much a change takes, and what that does to the answers."""
        columns = {"change": change.what, "share": change.share, "scope": change.scope}
        names = [n for n in self.factors if change.scope in scopes(n)]
        changed = {n: change(self.factors[n], self.seed) for n in names}
        taken = sum(float(torch.dist(changed[n], self.factors[n].matrix)) ** 2 for n in names)
        whole = sum(float(self.factors[n].s.square().sum()) for n in names)
        yield {**columns, "component": "energy", "value": taken / whole}
        network = self.network.altered(changed)
        yield from ({**columns, **row} for row in self.answers(network, part))

    @abstractmethod
    def answers(self, network: Network, part: str) -> Iterator[Rows]:
        """Compare what the changed network answers with the intact one."""


def scopes(name: str) -> tuple[str, ...]:
    """List all scopes that a matrix lies in."""
    return ("all", name, kind(name), "" if kind(name) == "embedding" else LAYERS)


@final
class LlamaEvaluation(Evaluation):
    """The Llama with the texts that it reads."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.llama, tokenizer = llama2c(downloads.path("stories15m").read_bytes())
        super().__init__(self.llama, seed)
        random = generator("pretrained texts", seed)
        own = self.llama.sampled(STORIES, tokens, random)
        text = downloads.text(downloads.SHAKESPEARE)
        starts = torch.randint(len(text) - 8 * tokens, (STORIES,), generator=random).tolist()
        # from the next line on; no token has more than 8 letters on average
        parts = [text[text.index("\n", start) :][: 8 * tokens] for start in starts]
        theirs = [[1, *tokenizer.encode(part.strip())][:tokens] for part in parts]
        self.texts = {"own": own, downloads.SHAKESPEARE: torch.tensor(theirs)}

    @cached_property
    def intact(self) -> dict[str, Tensor]:
        """The log probabilities of the words before any change."""
        return {name: self.llama(text).log_softmax(-1) for name, text in self.texts.items()}

    def answers(self, network: Network, part: str) -> Iterator[Rows]:  # noqa: D102 - as in Evaluation
        for name, text in self.texts.items():
            if part != "whole" and name != "own":
                continue
            before, after = self.intact[name], network(text).log_softmax(-1)
            divergence = float((before.exp() * (before - after)).sum(-1).mean())
            was, now = (
                float(nll_loss(words[:, :-1].flatten(0, 1), text[:, 1:].flatten()))
                for words in (before, after)
            )
            rise = (divergence if name == "own" else now - was) / was
            yield {"text": name, "component": "loss", "value": now, "target": was}
            yield {"text": name, "component": "divergence", "value": divergence}
            yield {"text": name, "component": "rise", "value": rise}
        before, after = (n.state[EMBEDDING][self.texts["own"]] for n in (self.network, network))
        taken = float((after - before).square().sum() / before.square().sum())
        yield {"text": "own", "component": "energy_spoken", "value": taken}


@final
class BertEvaluation(Evaluation):
    """The sentence encoder with lines of Shakespeare, no line in two seeds."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.bert: Bert = bert(downloads.path("minilm"))
        super().__init__(self.bert, seed)
        lines = downloads.text(downloads.SHAKESPEARE).splitlines()
        long = [line for line in lines if len(line) > 30]  # shorter ones are names and cries
        order = torch.randperm(len(long), generator=generator("pretrained sentences")).tolist()
        chosen = order[SENTENCES * seed : SENTENCES * (seed + 1)]
        self.sentences = [self.bert.encode(long[place])[:tokens] for place in chosen]

    @cached_property
    def intact(self) -> Tensor:
        """The positions of the sentences before any change."""
        return self.bert(self.sentences)

    def answers(self, network: Network, part: str) -> Iterator[Rows]:  # noqa: D102 - as in Evaluation
        before, after = self.intact, network(self.sentences)
        above = torch.ones(len(before), len(before)).triu(1).bool()
        was, now = ((x @ x.T)[above].numpy() for x in (before, after))
        about = {"text": downloads.SHAKESPEARE}
        distance = float(1 - (before * after).sum(-1).mean())
        yield {**about, "component": "distance", "value": distance}
        yield {**about, "component": "order", "value": rank_correlation(was, now).value}


EVALUATIONS: dict[str, Callable[[int, int], Evaluation]] = {
    "stories15m": LlamaEvaluation,
    "minilm": BertEvaluation,
}


def trials(
    seed: int, resume_point: ResumePoint, model: str, part: str, tokens: int = TOKENS
) -> Iterator[Rows]:
    """Measure the spectra of one checkpoint, or change it in many ways and compare its answers."""
    if part == "spectra":
        if model == "stories15m":
            llama: Llama = llama2c(downloads.path(model).read_bytes())[0]
            yield from spectrum_rows(llama.state, llama.config)
        else:
            name, _, size = model.partition(" ")
            folder = downloads.path(name)
            yield from spectrum_rows(*stored(folder / f"{size}.pth" if size else folder))
        return
    evaluation = EVALUATIONS[model](seed, tokens)
    changes, log = evaluation.changes(part), list[Rows]()
    with torch.no_grad():
        for step in resume_point.steps(len(changes), log):
            log += evaluation.rows(changes[step], part)
    yield from log


SECONDS = {
    "spectra": (5.0, 8.0),
    "whole": (28.0, 12.0),
    "kinds": (18.0, 8.0),
    "single": (23.0, 10.0),
}


def seconds(setting: Setting) -> float:
    """Estimate the time of a trial, as measured on one core: of the Llama, or of others."""
    cost = SECONDS[str(setting["part"])][setting["model"] != "stories15m"]
    return cost / 3 if setting.get("tokens", TOKENS) != TOKENS else cost


MODELS = ("stories15m", "minilm", "albert", "crepe tiny", "crepe full")
SEEDS = {"spectra": 1, "whole": 12, "kinds": 12, "single": 6}  # a spectrum is what it is
STUDY = Study(
    number=23,
    name="pretrained",
    title="Pretrained checkpoints",
    section="review W1(c), Q7",
    question=__doc__,
    finding=(
        "Feed-forward matrices are: they lie {{pretrained.severe feed_forward|.0f|interval}} "
        "deviations of chance above the mean [[pretrained.feed-forward holds]]. Matrices of "
        "attention are not, with {{pretrained.severe attention|.2f|interval}} deviations "
        "[[pretrained.severe fails]], and deeper layers are not shown to be worse "
        "[[pretrained.depth-grows undecided]]. The smallest singular values matter: at equal "
        "energy, removing them costs the Llama {{pretrained.bottom-energy llama|.0f|interval}} "
        "times what removing values of the bulk costs [[pretrained.bottom-energy holds]]. A "
        "larger κ does not go with more harm by rounding [[pretrained.kappa-predicts fails]]."
    ),
    grid=(
        *grid(model=MODELS, part=("spectra",)),
        *grid(model=tuple(EVALUATIONS), part=("whole", "kinds", "single")),
    ),
    trials=trials,
    own=lambda setting: SEEDS[str(setting["part"])],
    seconds=seconds,
    downloads=("stories15m", "tiny-shakespeare", "minilm", "albert", "crepe"),
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    quick={
        "grid": (
            *grid(model=("stories15m", "albert"), part=("spectra",)),
            *grid(model=("stories15m",), part=("whole",), tokens=(64,)),
        ),
        "own": lambda setting: 1 if setting["part"] == "spectra" else 6,
        "downloads": ("stories15m", "tiny-shakespeare", "albert"),
    },
)
